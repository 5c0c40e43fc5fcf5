"""The optional parts of responses with choices, on both routes: token ids, running usage, stop reasons, timings."""

from dataclasses import replace

import pytest
from helpers.clients import CHAT, chat, open_clients

from trioengine.testing import toy_answer

COMPLETIONS = "/v1/completions"
both_routes = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body(path, **fields):
    if path == CHAT:
        return chat("hello", **fields)
    return {"prompt": "hello", "temperature": 0, "max_tokens": 5, "ignore_eos": True, **fields}


def prompt_of(engine, path):
    if path == COMPLETIONS:
        return engine.tokenizer.encode("hello")
    return engine.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


@both_routes
async def test_token_ids(autojump_clock, clients, path):
    prompt = list(prompt_of(clients.engine, path))
    ids = list(toy_answer(prompt, 5, ignore_eos=True))
    answer = (await clients.request("POST", path, body(path, return_token_ids=True))).json
    (choice,) = answer["choices"]
    assert choice["token_ids"] == ids
    assert (answer if path == CHAT else choice)["prompt_token_ids"] == prompt
    *events, _ = (await clients.request("POST", path, body(path, return_token_ids=True, stream=True))).events
    first = events[0] if path == CHAT else events[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    assert sum("prompt_token_ids" in (event if path == CHAT else event["choices"][0]) for event in events) == 1
    assert [id for event in events for id in event["choices"][0].get("token_ids", ())] == ids


@both_routes
async def test_token_ids_without_text(autojump_clock, clients, path):
    """Of an end token, and with text that a stop string holds back."""
    for fields in ({"ignore_eos": False, "max_tokens": 300}, {"stop": ["no such text" * 10], "max_tokens": 30}):
        whole = (await clients.request("POST", path, body(path, return_token_ids=True, **fields))).json
        answer = await clients.request("POST", path, body(path, return_token_ids=True, stream=True, **fields))
        found = [id for event in answer.events[:-1] for id in event["choices"][0].get("token_ids", ())]
        assert found == whole["choices"][0]["token_ids"]


@both_routes
async def test_running_usage(autojump_clock, clients, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = (await clients.request("POST", path, body(path, stream=True, stream_options=options))).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 5 == last["usage"]["completion_tokens"]
    prompt = len(prompt_of(clients.engine, path))
    assert {event["usage"]["prompt_tokens"] for event in events} == {prompt}
    assert all(event["usage"]["total_tokens"] == prompt + event["usage"]["completion_tokens"] for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_as_token_ids(autojump_clock, clients, stream):
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "stream": stream}
    answer = await clients.chat(**fields)
    ids = toy_answer(prompt_of(clients.engine, CHAT), 5, ignore_eos=True)
    choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {"content": ()})["content"]]
    assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in ids]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)


@both_routes
async def test_stop_reasons(autojump_clock, clients, path):
    async def reasons(**fields):
        (whole,) = (await clients.request("POST", path, body(path, **fields))).json["choices"]
        events = (await clients.request("POST", path, body(path, stream=True, **fields))).events
        last = events[-2]["choices"][0]
        assert last["stop_reason"] == whole["stop_reason"] and last["finish_reason"] == whole["finish_reason"]
        return whole["finish_reason"], whole["stop_reason"]

    ids = toy_answer(prompt_of(clients.engine, path), 5, ignore_eos=True)
    text = clients.engine.tokenizer.decode(ids)
    assert await reasons() == ("length", None)
    assert await reasons(stop=["§", text[2:4]]) == ("stop", text[2:4])
    assert await reasons(stop_token_ids=[ids[3]]) == ("stop", ids[3])
    assert await reasons(ignore_eos=False, max_tokens=300) == ("stop", None)


@both_routes
@pytest.mark.parametrize("n", [1, 2])
async def test_timings(autojump_clock, clients, path, n):
    whole = (await clients.request("POST", path, body(path, n=n, timings_per_token=True))).json["timings"]
    *_, last, _ = (await clients.request("POST", path, body(path, n=n, timings_per_token=True, stream=True))).events
    assert last["choices"] == [] and last["timings"].keys() == whole.keys()
    assert whole["predicted_n"] == 5 and whole["predicted_ms"] > 0
    assert whole["predicted_per_second"] == pytest.approx(4000 / whole["predicted_ms"])
    assert whole["cache_n"] + whole["prompt_n"] == len(prompt_of(clients.engine, path))


@both_routes
async def test_the_fingerprint(autojump_clock, clients, path):
    whole = (await clients.request("POST", path, body(path))).json["system_fingerprint"]
    *events, _ = (await clients.request("POST", path, body(path, stream=True))).events
    assert {event["system_fingerprint"] for event in events} == {whole}
    runtime = clients.engine.runtime
    runtime._limits = replace(runtime.limits, quantization="gguf")
    other = (await clients.request("POST", path, body(path))).json["system_fingerprint"]
    runtime._limits = replace(runtime.limits, kv_cache_dtype="int8")
    third = (await clients.request("POST", path, body(path))).json["system_fingerprint"]
    runtime.power.weights = runtime.power.weights._replace(version=2)
    fourth = (await clients.request("POST", path, body(path))).json["system_fingerprint"]
    assert len({whole, other, third, fourth}) == 4


async def test_tokenizer_info(autojump_clock, clients):
    shown = (await clients.request("GET", "/tokenizer_info")).json
    tokenizer = clients.engine.tokenizer
    assert (shown["vocab_size"], shown["model_max_length"]) == (tokenizer.tokenizer.vocab_size, 512)
    assert shown["tokenizer_class"] == type(tokenizer.tokenizer).__name__
    assert shown["chat_template"] == (tokenizer.template_source or None)
    special = {token["content"]: int(id) for id, token in shown["added_tokens_decoder"].items()}
    assert special == tokenizer.tokenizer.special_tokens
    assert shown["eos_token"] is None and len(clients.engine.runtime.files.model.eos_token_ids) == 2


async def test_tokenizer_info_needs_the_key(autojump_clock):
    async with open_clients(api_key=("secret-of-a-user-of-this",)) as clients:
        assert (await clients.request("GET", "/tokenizer_info")).status == 401
