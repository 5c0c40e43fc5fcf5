"""`echo` with `logprobs` over HTTP, by a real worker in float32: transformers' log-softmax of the prompt."""

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


async def test_echoed_scores_are_those_of_transformers(tmp_path):
    """The prompt is prefilled in chunks of 7; before and after an answer that takes it from the prefix cache."""
    path = tiny_llama.write(tmp_path / "tiny", "plain")
    (path / "tokenizer.json").write_text(tokenizer_json())
    config = EngineConfig(
        model=str(path), dtype="float32", kv_cache_memory=4 << 20, num_threads=1, chunked_prefill_size=7
    )
    async with open_unwrapped_nursery() as nursery:
        server = await nursery.start(partial(serve, config, ServeConfig(port=0)))
        await server.engine.ready()
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            client = HttpClient(stream)
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
        server.abort()
