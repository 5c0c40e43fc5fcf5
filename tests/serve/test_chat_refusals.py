"""Chat completions that are refused: each by the name of the field at fault."""

import json

import pytest
from helpers.clients import CHAT, chat

REFUSED = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"model": 1}, 400, "invalid_type", "model"),
    ({"messages": None}, 400, "missing_parameter", "messages"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hello"}, 400, "invalid_type", "messages"),
    ({"messages": ["hello"]}, 400, "invalid_type", "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "invalid_type", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "missing_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, 400, "unsupported_parameter", "messages[0].name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        400,
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "images_not_supported",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        400,
        "invalid_type",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        400,
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": ""}] * 3000}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 4_000_000}]}, 400, "context_length_exceeded", "messages"),
    ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
    ({"temperature": True}, 400, "invalid_type", "temperature"),
    ({"max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
    ({"max_tokens": 5.5}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": []}, 400, "invalid_type", "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": "5"}, 400, "invalid_type", "top_logprobs"),
    ({"ignore_eos": 1}, 400, "invalid_type", "ignore_eos"),
    ({"stop": 1}, 400, "invalid_type", "stop"),
    ({"stop_token_ids": 1}, 400, "invalid_type", "stop_token_ids"),
    ({"cache_salt": 1}, 400, "invalid_type", "cache_salt"),
    ({"cache_salt": "x" * 257}, 400, "invalid_value", "cache_salt"),
    ({"cache_salt": "\ud800"}, 400, "invalid_value", "cache_salt"),
    ({"logit_bias": []}, 400, "invalid_type", "logit_bias"),
    ({"metadata": "x"}, 400, "invalid_type", "metadata"),
    ({"request_id": 7}, 400, "invalid_type", "request_id"),
    ({"request_id": ""}, 400, "invalid_value", "request_id"),
    ({"request_id": "x" * 129}, 400, "invalid_value", "request_id"),
    ({"temperature": float("1e999")}, 400, "invalid_json", None),
    ({"top_p": 2}, 400, "invalid_value", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
    ({"max_completion_tokens": 5}, 400, "invalid_value", "max_completion_tokens"),
    ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    ({"stop_token_ids": [100_000]}, 400, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logprobs": 1}, 400, "invalid_type", "logprobs"),
    ({"top_logprobs": 1}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"n": True}, 400, "unsupported_parameter", "n"),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"stream": False, "stream_options": {}}, 400, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, 400, "invalid_type", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "unsupported_parameter", "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "invalid_type", "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "unsupported_parameter",
        "stream_options.include_obfuscation",
    ),
    ({"store": True}, 400, "unsupported_parameter", "store"),
    ({"metadata": {"a": 1}}, 400, "invalid_value", "metadata"),
    ({"user": 1}, 400, "invalid_type", "user"),
    ({"tools": [{}]}, 400, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"functions": []}, 400, "unsupported_parameter", "functions"),
    ({"reasoning_effort": "low"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"best_of": 1}, 400, "unsupported_parameter", "best_of"),
    ({"chat_template": "x"}, 400, "unsupported_parameter", "chat_template"),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused(autojump_clock, clients, caplog, fields, status, code, param):
    """Alike with and without stream; the connection goes on, and the engine has heard of it at most as rejected."""
    for stream in (False, True) if "stream" not in fields else (fields["stream"],):
        async with clients.connect() as client:
            answer = await client.request("POST", CHAT, chat(**{"stream": stream, **fields}))
            assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
            assert answer.error["type"] == "invalid_request_error"
            assert param is None or param in answer.error["message"]
            assert (await client.request("GET", "/health")).status == 200
    assert not caplog.records


BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"n": NaN}', "invalid_json"),
    (b'{"n": ' + b"1" * 5000 + b"}", "invalid_json"),
    ('{"user": "ä"}'.encode("latin-1"), "invalid_json"),
    ('{"user": "ä"}'.encode("utf-16"), "invalid_json"),
    (b'"hello"', "invalid_type"),
    (b"[]", "invalid_type"),
]


@pytest.mark.parametrize(("body", "code"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize", "/abort_request"])
async def test_bodies_that_are_no_json_object(autojump_clock, clients, path, body, code):
    answer = await clients.request("POST", path, body)
    assert (answer.status, answer.error["code"]) == (400, code)


async def test_a_template_that_cannot_render(autojump_clock, clients, monkeypatch):
    template = clients.engine.tokenizer._template
    monkeypatch.setattr(template, "_template", type(template)("{{ raise_exception('no') }}")._template)
    answer = await clients.chat()
    assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "template_error", "messages")


async def test_a_body_that_is_too_large(autojump_clock, clients):
    answer = await clients.request("POST", CHAT, b" " * ((4 << 20) + 1))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_a_long_body_is_parsed_in_a_thread(autojump_clock, clients):
    """So is its prompt: the passes of the simulated thread go by."""
    clients.simulation.thread_passes = 50
    answer = await clients.request("POST", CHAT, json.dumps(chat()).encode() + b" " * (70 << 10))
    assert answer.status == 200
