"""Fields that other clients send: without effect, passed over and named, or refused if the server is told to."""

import pytest
from helpers.clients import CHAT, chat, open_clients

HARMLESS = {
    "user": "me",
    "metadata": {"a": 1},
    "service_tier": "flex",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "parallel_tool_calls": False,
    "safety_identifier": 3,
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "tool_choice": "none",
    "tools": [],
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "n": 1,
    "modalities": ["text"],
    "audio": None,
    "logprobs": None,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_effect(autojump_clock, clients, caplog, stream):
    plain = await clients.request("POST", CHAT, chat(stream=stream, temperature=0))
    answer = await clients.request("POST", CHAT, chat(stream=stream, temperature=0, **HARMLESS))
    assert (plain.status, answer.status) == (200, 200)
    assert "x-unknown-fields" not in answer.headers
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named(autojump_clock, clients, caplog, stream):
    for _ in range(2):
        answer = await clients.request("POST", CHAT, chat(stream=stream, topk=3, mood="good", **{"a\nb": 1}, none=None))
        assert answer.status == 200
        assert answer.headers["x-unknown-fields"] == "topk, mood, ?"
    assert [record.getMessage() for record in caplog.records] == [
        "clients send the field 'topk', which has no effect here; did you mean 'top_k'?",
        "clients send the field 'mood', which has no effect here",
        "clients send the field '?', which has no effect here",
    ]


async def test_unknown_fields_of_tokenize(autojump_clock, clients):
    answer = await clients.request("POST", "/tokenize", {"prompt": "a", "mood": "good"})
    assert (answer.status, answer.headers["x-unknown-fields"]) == (200, "mood")


async def test_unknown_fields_are_refused_on_request(autojump_clock):
    async with open_clients(unknown_fields="refuse") as clients:
        answer = await clients.request("POST", CHAT, chat(topk=3))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "topk")
        assert (await clients.request("POST", CHAT, chat(**HARMLESS))).status == 200


async def test_messages_that_clients_send_back(autojump_clock, clients):
    """With the members that SDKs have in an answer."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be kind"}], "name": "boss"},
        {"role": "user", "content": "a", "name": "me", "id": 7},
        {"role": "assistant", "content": None, "refusal": "no", "annotations": [], "audio": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "refusal", "refusal": "d"}]},
        {"role": "user", "content": "e"},
    ]
    answer = await clients.chat(messages=messages)
    plain = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
    ]
    same = await clients.chat(messages=plain)
    assert answer.json["usage"]["prompt_tokens"] == same.json["usage"]["prompt_tokens"]
    assert answer.json["choices"] == same.json["choices"]


async def test_max_completion_tokens_goes_before_max_tokens(autojump_clock, clients):
    answer = await clients.request("POST", CHAT, chat(max_tokens=9, max_completion_tokens=2))
    assert answer.json["usage"]["completion_tokens"] == 2


async def test_all_tokens_by_vllms_number(autojump_clock, clients):
    assert (await clients.request("POST", CHAT, chat(top_k=-1))).status == 200
