"""Gemma 3 270M by its name, through a server in the default dtype: llama.cpp's tokens, completions and chats."""

from functools import partial

import pytest
import trio
from helpers.clients import HttpClient
from helpers.torch_driver import reference

from trioengine import EngineConfig
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve

PATIENCE = 300  # seconds; a guard against hanging
GREEDY = {"temperature": 0, "max_tokens": 16}
SYSTEM, QUESTION = "Be brief.", "Name the capital of France."
RENDERING = f"<bos><start_of_turn>user\n{SYSTEM}\n\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
END_OF_TURN = 106


@pytest.mark.usefixtures("gemma3")
async def test_a_server_of_gemma3():
    """One server for all of it: a start takes seconds."""
    config = EngineConfig(model="gemma3-270m", kv_cache_memory=64 << 20, max_model_len=1024, num_threads=1)
    with trio.fail_after(PATIENCE):
        async with open_unwrapped_nursery() as nursery:
            server = await nursery.start(partial(serve, config, ServeConfig(port=0)))
            await server.engine.ready()
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                client = HttpClient(stream)
                await prompts_are_llama_cpps(client)
                await a_completion_continues_its_prompt(client)
                await a_chat_is_rendered_as_gemmas_turns(client)
                await a_chat_ends_with_the_turn(client)
            server.abort()


async def asked(client, path, **fields):
    response = await client.request("POST", path, fields)
    assert response.status == 200, response.json
    return response.json


async def prompts_are_llama_cpps(client):
    for case in reference("gemma3_llama_cpp.json"):
        assert (await asked(client, "/tokenize", prompt=case["text"]))["tokens"] == case["prompt"]


async def a_completion_continues_its_prompt(client):
    (choice,) = (await asked(client, "/v1/completions", prompt="Water boils at", **GREEDY))["choices"]
    assert choice["text"].startswith(" 100 degrees Celsius.")


async def a_chat_is_rendered_as_gemmas_turns(client):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tokens = (await asked(client, "/tokenize", messages=messages))["tokens"]
    assert tokens == (await asked(client, "/tokenize", prompt=RENDERING, add_special_tokens=False))["tokens"]
    answer = await asked(client, "/v1/chat/completions", messages=messages, **GREEDY)
    same = await asked(client, "/v1/completions", prompt=tokens, **GREEDY)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"] != ""


async def a_chat_ends_with_the_turn(client):
    messages = [{"role": "user", "content": QUESTION}]
    answer = await asked(client, "/v1/chat/completions", messages=messages, logit_bias={END_OF_TURN: 100}, **GREEDY)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    assert answer["usage"]["completion_tokens"] == 1
