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
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "invalid_type", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "missing_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, 400, "invalid_type", "messages[0].name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        400,
        "invalid_value",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
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
        "missing_parameter",
        "messages[0].tool_calls[0].function",
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
    ({"request_id": 7}, 400, "invalid_type", "request_id"),
    ({"request_id": ""}, 400, "invalid_value", "request_id"),
    ({"request_id": "x" * 129}, 400, "invalid_value", "request_id"),
    ({"temperature": float("1e999")}, 400, "invalid_json", None),
    ({"top_p": 2}, 400, "invalid_value", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
    ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    ({"stop_token_ids": [100_000]}, 400, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logprobs": 1}, 400, "invalid_type", "logprobs"),
    ({"top_logprobs": 1}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"n": 17}, 400, "invalid_value", "n"),
    ({"n": True}, 400, "invalid_type", "n"),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"stream": False, "stream_options": {}}, 400, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, 400, "invalid_type", "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "unsupported_parameter",
        "stream_options.include_obfuscation",
    ),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "invalid_type", "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "unsupported_parameter",
        "stream_options.include_obfuscation",
    ),
    ({"tools": [{}]}, 400, "missing_parameter", "tools[0].function"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format.type"),
    ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
    ({"reasoning_effort": "low"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
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


# Messages, each with the path of the field, its rule and the value.
RULES = [
    ({"temperature": 101}, "temperature must be a number from 0 to 100, got 101"),
    ({"temperature": "hot"}, 'temperature must be a number from 0 to 100, got "hot"'),
    ({"max_tokens": 5.5}, "max_tokens must be an integer from 1 to 2147483647, got 5.5"),
    ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
    ({"stop": ["a", ""]}, 'stop[1] must be a string of 1 to 256 characters, got ""'),
    (
        {"stop": 1},
        "stop must be a string or a list of at most 16 entries, got 1",
    ),
    (
        {"logit_bias": {"1": 200}},
        "logit_bias must be an object of at most 1024 members (each key an integer from 0 to 2147483647, each value "
        'a number from -100 to 100), got {"1": 200}',
    ),
    ({"messages": []}, "messages must be a list of at least 1 entries, got []"),
    (
        {"messages": [{"role": "robot"}]},
        'messages[0].role must be "system", "developer", "user", "assistant" or "tool", got "robot"',
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (
        {"messages": [{"role": "user", "content": 3}]},
        "messages[0].content must be a string or a list of at least 1 entries, got 3",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}]},
        'messages[0].content[1].type must be "text" or "image_url", got "video"',
    ),
    ({"n": 17}, "n must be an integer from 1 to 16, got 17"),
    ({"audio": {"voice": "x"}}, 'audio is not supported, got {"voice": "x"}'),
]


@pytest.mark.parametrize(("fields", "message"), RULES, ids=range(len(RULES)))
async def test_messages_of_refusals(autojump_clock, clients, fields, message):
    answer = await clients.request("POST", CHAT, chat(**fields))
    assert answer.error["message"] == message


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
