"""Engines on the CPU and on CUDA, in float32: the same tokens, at once, after a death, and after sleep."""

import json
import os
import signal

import pytest
import trio
from helpers import tiny_llama
from helpers.small_models import TEMPLATE, tokenizer_json

from trioengine import EngineConfig, Grammar, SamplingParams, open_engine

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["crimson", "turquoise"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
KINDS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, top_k=50, seed=3, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=40, min_tokens=9, temperature=0, repetition_penalty=1.3, presence_penalty=0.5
    ),
    "schema": SamplingParams(max_tokens=200, temperature=0.7, seed=5, grammar=Grammar.json_schema(SCHEMA)),
}
REQUESTS = [(f"Question {number}: why is the sea so deep?"[number:], kind) for number in range(4) for kind in KINDS]
LONG = SamplingParams(max_tokens=300, temperature=0.8, seed=7, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["plain", "qwen2"])
def model(request, tmp_path_factory):
    """Random weights, and a tokenizer of bytes."""
    path = tiny_llama.write(
        tmp_path_factory.mktemp("devices"), request.param, vocab_size=264, max_position_embeddings=1024
    )
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def config(model, device):
    return EngineConfig(
        model=str(model),
        device=device,
        dtype="float32",
        kv_cache_memory=16 << 20,
        num_threads=1,
        chunked_prefill_size=33,
        restart_delays=(0.0,),
    )


@pytest.fixture(scope="module")
def expected(model):
    """The tokens of each request on the CPU, one after the other; then those of LONG."""

    async def ask():
        async with open_engine(config(model, "cpu")) as engine:
            found = [await engine.generate(prompt, KINDS[kind]) for prompt, kind in REQUESTS]
            return [*found, await engine.generate("Tell me a story.", LONG)]

    return [completion.token_ids for completion in trio.run(ask)]


@pytest.fixture
async def engine(model, device):
    with trio.fail_after(PATIENCE):
        async with open_engine(config(model, device)) as engine:
            assert engine.limits.device == device
            yield engine
            await engine.check_invariants()


async def test_answers_are_those_of_the_cpu(engine, expected):
    """All at once, and a second time, when their prompts are in the prefix cache."""
    found: dict = {}

    async def ask(number, prompt, kind):
        found[number] = await engine.generate(prompt, KINDS[kind])

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for number, request in enumerate(REQUESTS):
                nursery.start_soon(ask, number, *request)
        assert [found[number].token_ids for number in range(len(REQUESTS))] == expected[:-1]
    assert found[0].usage.cached_tokens > 0
    for number, (_, kind) in enumerate(REQUESTS):
        if kind == "schema":
            assert json.loads(found[number].text).keys() == SCHEMA["properties"].keys()


async def test_a_stream_outlives_its_killed_worker(engine, expected):
    async with engine.open_session() as session:
        async with session.generate("Tell me a story.", LONG) as stream:
            await anext(stream)
            os.kill(engine.statistics().worker_pid, signal.SIGKILL)
            completion = await stream.result()
    assert (completion.token_ids, completion.resumed) == (expected[-1], 1)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_stream_outlives_a_sleep(engine, expected, level):
    async with engine.open_session() as session:
        async with session.generate("Tell me a story.", LONG) as stream:
            await anext(stream)
            await engine.sleep(level, mode="keep")
            assert engine.statistics().suspended == 1
            await engine.wake()
            completion = await stream.result()
    assert completion.token_ids == expected[-1]
