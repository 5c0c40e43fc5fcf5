"""Scored prompts and choices over HTTP, by a real worker in float32: transformers' log-softmax, and one prefill."""

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from helpers import tiny_llama
from helpers.clients import HttpClient
from helpers.small_models import tokenizer_json
from helpers.torch_driver import reference

from trioengine import EngineConfig
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve

KNOWN = reference("tiny_reference.json")["plain"]
ANSWERED = {"prompt": tiny_llama.PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
ECHOED = {**ANSWERED, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}


@asynccontextmanager
async def served(path, device):
    """The engine and a client of a server whose prompts are prefilled in chunks of 7."""
    tiny_llama.write(path, "plain")
    (path / "tokenizer.json").write_text(tokenizer_json())
    config = EngineConfig(
        model=str(path),
        device=device,
        dtype="float32",
        kv_cache_memory=4 << 20,
        num_threads=1,
        chunked_prefill_size=7,
    )
    async with open_unwrapped_nursery() as nursery:
        server = await nursery.start(partial(serve, config, ServeConfig(port=0)))
        await server.engine.ready()
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            yield server.engine, HttpClient(stream)
        server.abort()


async def test_echoed_scores_are_those_of_transformers(tmp_path, device):
    """Before and after an answer that takes the prompt from the prefix cache."""
    async with served(tmp_path / "tiny", device) as (_, client):
        for _ in range(2):
            (choice,) = (await client.request("POST", "/v1/completions", ECHOED)).json["choices"]
            assert choice["logprobs"]["tokens"] == [
                f"token_id:{id}" for id in (*tiny_llama.PROMPT, *KNOWN["output"][:2])
            ]
            scores, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert scores[0] is top[0] is None
            assert scores[1:90] == pytest.approx(KNOWN["prompt_logprobs"], abs=1e-4)
            assert [max(best.values()) for best in top[1:90]] == pytest.approx(KNOWN["best_logprobs"], abs=1e-4)
            assert scores[90] == pytest.approx(KNOWN["logprob"], abs=1e-4)
            usage = (await client.request("POST", "/v1/completions", ANSWERED)).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 7


async def test_choices_share_a_prefill(tmp_path, device):
    """Each has the tokens that its seed gives alone."""
    body = {**ECHOED, "echo": False, "max_tokens": 12, "temperature": 1, "seed": 7}
    async with served(tmp_path / "tiny", device) as (engine, client):
        choices = (await client.request("POST", "/v1/completions", {**body, "n": 4})).json["choices"]
        statistics = engine.statistics()
        computed = statistics.prefix_cache_queries - statistics.prefix_cache_hits
        assert computed < len(tiny_llama.PROMPT) + 3 * engine.config.block_size
        for choice in choices:
            alone = {**body, "seed": 7 + choice["index"]}
            (other,) = (await client.request("POST", "/v1/completions", alone)).json["choices"]
            assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert len({tuple(choice["logprobs"]["tokens"]) for choice in choices}) == 4
