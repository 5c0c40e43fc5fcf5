"""Refused events of the Realtime protocol: an error event names the fault, and the connection lives."""

import json

import pytest
from helpers.realtime_texts import GREEDY

BIAS = "response.logit_bias"
NAMED = "response.conversation"
ID = "response.input[0].id"
PART = {"type": "input_text", "text": "x"}


def create(**fields):
    """The event that creates an item."""
    item = {"type": "message", "role": "user", "content": [PART], **fields}
    return json.dumps({"type": "conversation.item.create", "item": item})


BAD_EVENTS = [
    ("{", "invalid_json", None),
    ("[" * 100_000, "invalid_json", None),
    ('{"type": NaN}', "invalid_json", None),
    ("[1]", "invalid_event", None),
    (b"{}", "invalid_event", None),
    ("{}", "unknown_event", "type"),
    ('{"type": ["x"]}', "unknown_event", "type"),
    ('{"type": "input_audio_buffer.append", "audio": ""}', "unknown_event", "type"),
    ('{"type": "conversation.item.truncate"}', "missing_parameter", "item_id"),
    ('{"type": "conversation.item.truncate", "item_id": "x"}', "missing_parameter", "content_index"),
    (
        '{"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": 5}',
        "unsupported_parameter",
        "audio_end_ms",
    ),
    (
        '{"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "text_end": 1}',
        "item_not_found",
        "item_id",
    ),
    ('{"type": "response.create", "event_id": 1}', "invalid_value", "event_id"),
    ('{"type": "response.create"}', "empty_conversation", None),
    ('{"type": "response.create", "response": []}', "invalid_type", "response"),
    ('{"type": "response.create", "response": {"input": [{"type": "item_reference"}]}}', "missing_parameter", ID),
    ('{"type": "response.create", "response": {"input": []}}', "empty_conversation", None),
    ('{"type": "response.create", "response": {"input": {}}}', "invalid_type", "response.input"),
    ('{"type": "response.create", "response": {"input": [{}]}}', "missing_parameter", "response.input[0].type"),
    (
        '{"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "x"}]}}',
        "item_not_found",
        "response.input[0].id",
    ),
    (
        '{"type": "response.create", "response": {"output_modalities": ["audio"]}}',
        "unsupported_parameter",
        "response.output_modalities",
    ),
    (
        '{"type": "response.create", "response": {"input": [{"type": "mcp_call", "output": ""}]}}',
        "unsupported_item",
        "response.input[0].type",
    ),
    (
        '{"type": "response.create", "response": {"conversation": "conv_1"}}',
        "invalid_value",
        "response.conversation",
    ),
    *(
        (f'{{"type": "response.create", "response": {{"conversation": {value}}}}}', code, NAMED)
        for value, code in (
            ('""', "invalid_value"),
            *((value, "invalid_type") for value in ("0", "false", "[]", "{}", "1.5")),
        )
    ),
    ('{"type": "response.create", "response": {"temperature": -1}}', "invalid_value", "response.temperature"),
    (
        '{"type": "response.create", "response": {"max_output_tokens": 0}}',
        "invalid_value",
        "response.max_output_tokens",
    ),
    *(
        (f'{{"type": "response.create", "response": {{"logit_bias": {{"{key}": 1}}}}}}', "invalid_value", BIAS)
        for key in ("x", "", "1_0", "٥", "５", " 7 ", "+7", "-1", "07", "9" * 5000)
    ),
    ('{"type": "response.create", "response": {"metadata": {"x": 1}}}', "invalid_type", "response.metadata"),
    ('{"type": "session.update"}', "missing_parameter", "session"),
    ('{"type": "session.update", "session": {"model": "other"}}', "unsupported_parameter", "session.model"),
    ('{"type": "session.update", "session": {"type": "transcription"}}', "invalid_value", "session.type"),
    ('{"type": "session.update", "session": {"instructions": "\\ud800"}}', "invalid_value", "session.instructions"),
    ('{"type": "conversation.item.retrieve", "item_id": "x"}', "item_not_found", "item_id"),
    ('{"type": "conversation.item.delete", "item_id": {}}', "invalid_type", "item_id"),
    ('{"type": "conversation.item.create", "item": 1}', "invalid_type", "item"),
    ('{"type": "conversation.item.create", "item": {"type": "mcp_call"}}', "unsupported_item", "item.type"),
    (
        '{"type": "conversation.item.create", "item": {"type": "message", "role": "tool"}}',
        "invalid_value",
        "item.role",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}}',
        "invalid_value",
        "item.content",
    ),
    *(
        (create(**{name: value}), code, f"item.{name}")
        for name, value, code in (
            ("object", 1, "invalid_type"),
            ("object", "item", "invalid_value"),
            ("status", [], "invalid_type"),
            ("status", "done", "invalid_value"),
            ("id", "root", "invalid_value"),
        )
    ),
    (create(content=[PART] * 65), "invalid_value", "item.content"),
    (
        '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", '
        '"content": [{"type": "input_audio", "audio": ""}]}}',
        "unsupported_content",
        "item.content[0].type",
    ),
]


@pytest.mark.parametrize(("message", "code", "param"), BAD_EVENTS)
async def test_a_bad_event_is_an_error_event_and_the_connection_lives(autojump_clock, clients, message, code, param):
    async with clients.realtime() as client:
        await client.websocket.send_message(message)
        event = await client.next()
        assert event["type"] == "error"
        error = event["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
        assert param is None or param in error["message"]
        response = await client.ask("hello", **GREEDY)
        assert response["status"] == "completed"


async def test_an_item_that_comes_back(autojump_clock, clients):
    """As the server shows it, with what is of no effect."""
    async with clients.realtime() as client:
        for status in ("completed", "incomplete"):
            await client.websocket.send_message(create(object="realtime.item", status=status, content=[PART] * 64))
            assert (await client.until("conversation.item.done"))["item"]["status"] == "completed"


async def test_a_full_conversation_takes_no_answers_either(autojump_clock, clients, monkeypatch):
    """Not even such as cost nothing to ask for."""
    monkeypatch.setattr("trioengine.serve.realtime.items.MAX_ITEMS", 3)
    async with clients.realtime() as client:
        await client.say("hello", id="first")
        for _ in range(2):
            assert (await client.respond(**GREEDY))["output"]
        for _ in range(2):
            await client.send("response.create", response=GREEDY)
            assert (await client.until("error"))["error"]["code"] == "conversation_too_large"
        assert (await client.respond(conversation="none", **GREEDY))["output"]
        await client.send("conversation.item.delete", item_id="first")
        assert (await client.respond(**GREEDY))["output"]


async def test_an_input_that_means_an_item_many_times(autojump_clock, clients):
    """It counts each time: a short event must not become gigabytes."""
    async with clients.realtime() as client:
        await client.say("x" * 500_000, id="long")
        references = [{"type": "item_reference", "id": "long"}]
        await client.send("response.create", response={"input": references * 17})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("conversation_too_large", "response.input")
        await client.send("response.create", response={"input": references * 16})
        assert (await client.until("error"))["error"]["code"] == "context_length_exceeded"


async def test_an_id_can_be_used_once(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("one", id="same")
        await client.say("two", id="same")
        assert (await client.until("error"))["error"]["code"] == "duplicate_item"


async def test_a_prompt_beyond_the_context_fails_alone(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("x" * 2000, id="long")
        await client.send("response.create", event_id="mine", response=GREEDY)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("context_length_exceeded", "mine")
        response = (await client.until("response.done"))["response"]
        assert (response["status"], response["output"]) == ("failed", [])
        assert response["status_details"]["error"]["code"] == "context_length_exceeded"
        await client.send("conversation.item.delete", item_id="long")
        assert (await client.ask("hello", **GREEDY))["status"] == "completed"
