"""A forced call of the real model, embedded, over a connection and without trio."""

import json
from functools import partial

import trio

from trioengine import EngineConfig, FinishReason, blocking, connect
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve

PATIENCE = 300  # seconds; a guard against hanging
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
SAMPLING = {"max_tokens": 80, "temperature": 0}
QUESTION = "What is the weather in Paris?"


def check(completion):
    assert (completion.finish_reason, completion.text) == (FinishReason.TOOL_CALLS, "")
    (call,) = completion.tool_calls
    assert call.name == "weather" and json.loads(call.arguments).keys() == {"city"}
    return call


async def ask(api):
    async with api.open_session() as session:
        call = check(await session.ask(QUESTION, **FORCED, **SAMPLING))
        output = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
        following = await session.ask([output], max_tokens=16, temperature=0)
        assert following.text and len(session.history) == 4
    return call.arguments, following.text


def ask_blocking(url):
    with blocking.connect(url) as client, client.open_session() as session:
        generation = session.generate(QUESTION, **FORCED, **SAMPLING)
        deltas = [delta for chunk in generation for delta in chunk.tool_calls]
        call = check(generation.completion)
        assert "".join(delta.arguments for delta in deltas) == call.arguments
    return call.arguments


async def test_a_forced_call(smollm2):
    config = EngineConfig(model=str(smollm2), kv_cache_memory=64 << 20, max_model_len=1024, num_threads=1)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(serve, config, ServeConfig(port=0)))
            await server.engine.ready()
            url = f"http://127.0.0.1:{server.port}"
            embedded = await ask(server.engine)
            async with connect(url) as client:
                assert await ask(client) == embedded
            assert await trio.to_thread.run_sync(ask_blocking, url) == embedded[0]
            await server.engine.check_invariants()
            server.abort()
