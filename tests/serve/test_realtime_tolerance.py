"""Configurations and items as OpenAI's packages send them: what has no effect on text is passed over."""

import json

import pytest
from helpers.clients import open_clients
from helpers.realtime_texts import GREEDY, assistant, reference, text_of, user

# As the realtime part of openai-agents sends it, and as agents-js does.
PYTHON = {
    "type": "realtime",
    "model": "toy",
    "instructions": "be brief",
    "output_modalities": ["text"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "noise_reduction": None,
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {"type": "semantic_vad", "interrupt_response": True},
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash", "speed": 1.0},
    },
    "tools": [],
    "tool_choice": "auto",
    "tracing": "auto",
    "prompt": {"id": "pmpt_1", "version": None, "variables": {}},
    "include": ["item.input_audio_transcription.logprobs"],
    "max_output_tokens": 40,
}
JAVASCRIPT = {
    "type": "realtime",
    "instructions": "be brief",
    "model": "toy",
    "output_modalities": ["text", "audio"],
    "tools": [],
    "tool_choice": "none",
    "audio": {"input": {"turn_detection": None}, "output": {"voice": "alloy", "speed": 1.5}},
    "tracing": {"workflow_name": "x", "group_id": "y", "metadata": {}},
    "reasoning": {"effort": "low"},
    "parallel_tool_calls": True,
    "max_output_tokens": 40,
}
EARLIER = {  # the protocol's first form
    "modalities": ["text", "audio"],
    "instructions": "be brief",
    "voice": "ash",
    "input_audio_format": "pcm16",
    "output_audio_format": "pcm16",
    "input_audio_transcription": {"model": "whisper-1"},
    "turn_detection": {"type": "server_vad"},
    "max_response_output_tokens": "inf",
    "max_output_tokens": 40,
    "speed": 1.0,
}


@pytest.mark.parametrize("session", [PYTHON, JAVASCRIPT, EARLIER], ids=["python", "javascript", "earlier"])
@pytest.mark.parametrize("unknown_fields", ["warn", "refuse"])
async def test_a_configuration_with_audio_applies_the_rest(autojump_clock, caplog, session, unknown_fields):
    """It is no reason for a complaint, even where unknown fields are refused."""
    async with open_clients(unknown_fields=unknown_fields) as clients, clients.realtime() as client:
        await client.send("session.update", session=session)
        updated = (await client.until("session.updated"))["session"]
        assert (updated["instructions"], updated["max_output_tokens"]) == ("be brief", 40)
        assert (updated["output_modalities"], "audio" in updated, updated["tracing"]) == (["text"], False, None)
        response = await client.ask("hello", temperature=0)
        assert text_of(response) == reference(clients, [{"role": "system", "content": "be brief"}, user("hello")])
    assert not caplog.records


async def test_a_session_is_taken_as_the_server_shows_it(autojump_clock, caplog, clients):
    async with clients.realtime() as client:
        settings = {"instructions": "be", "temperature": 0.5, "stop": ["x"], "logit_bias": {"7": 1}, "seed": 3}
        truncation = {"type": "retention_ratio", "retention_ratio": 0.5}
        await client.send("session.update", session={**settings, "truncation": truncation})
        shown = (await client.until("session.updated"))["session"]
        assert {name: shown[name] for name in settings} == settings
        await client.send("session.update", session=shown)
        assert (await client.until("session.updated"))["session"] == shown
    assert not caplog.records


REFUSED = [
    (
        {"output_modalities": ["audio"]},
        "output_modalities",
        '{} must be ["text"], ["text", "audio"] or ["audio", "text"], got ["audio"]',
    ),
    ({"max_response_output_tokens": 5}, "max_response_output_tokens", '{} must be "inf", got 5'),
    (
        {"truncation": {"type": "retention_ratio", "retention_ratio": 1, "token_limits": {"post_instructions": 9}}},
        "truncation.token_limits",
        '{} is not supported, got {{"post_instructions": 9}}',
    ),
]


@pytest.mark.parametrize(("fields", "name", "message"), REFUSED, ids=range(len(REFUSED)))
async def test_a_setting_that_would_change_the_answer_is_refused(autojump_clock, clients, fields, name, message):
    """By its name, and nothing of the event is applied."""
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("session.update", session={**fields, "instructions": "be"})
        await client.send("response.create", response=fields)
        for where in ("session", "response"):
            error, param = (await client.until("error"))["error"], f"{where}.{name}"
            assert (error["code"], error["param"]) == ("unsupported_parameter", param)
            assert error["message"] == message.format(param)
        assert text_of(await client.respond(**GREEDY)) == reference(clients, [user("hello")])


async def test_another_model_is_refused(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("session.update", session={"model": "gpt-realtime"})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session.model")
        assert error["message"] == 'session.model must be "toy", got "gpt-realtime"'


async def test_items_as_packages_send_them_back(autojump_clock, caplog, clients):
    """With the members of other kinds of parts, and with an index."""
    part = {"text": "hello", "audio": None, "transcript": None, "image_url": None, "detail": None, "index": 0}
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", **part}],
        "object": "realtime.item",
        "status": "completed",
        "call_id": None,
        "previous_item_id": None,
        "phase": "final",
    }
    async with clients.realtime() as client:
        await client.send("conversation.item.create", item=item, previous_item_id=None)
        said = {**item, "role": "assistant", "content": [{"type": "output_text", **part}]}
        await client.send("conversation.item.create", item=said)
        again = [{**item, "id": "again"}, {"type": "item_reference", "id": "x", "object": "realtime.item"}]
        await client.send("conversation.item.create", item={**item, "id": "x"})
        response = await client.respond(input=again, **GREEDY)
        assert text_of(response) == reference(clients, [user("hello")] * 2)
        messages = [user("hello"), assistant("hello"), user("hello"), assistant(text_of(response))]
        assert text_of(await client.respond(**GREEDY)) == reference(clients, messages)
    assert not caplog.records


async def test_a_truncation_that_has_no_audio(autojump_clock, clients):
    """The packages' types require `audio_end_ms`."""
    async with clients.realtime() as client:
        await client.say("answer", role="assistant", id="said")
        place = {"item_id": "said", "content_index": 0}
        await client.send("conversation.item.truncate", **place, audio_end_ms=0)
        assert (await client.until("error"))["error"]["param"] == "text_end"
        await client.send("conversation.item.truncate", **place, audio_end_ms=0, text_end=1)
        assert (await client.until("conversation.item.truncated"))["text_end"] == 1


SURROGATES = [
    ({"type": "response.create", "response": {"instructions": "\ud800"}}, "response.instructions"),
    ({"type": "response.create", "response": {"\udfff": 1}}, "response"),
    ({"type": "conversation.item.retrieve", "item_id": "\ud800"}, "item_id"),
    ({"type": "\ud800"}, "type"),
]


@pytest.mark.parametrize(("event", "param"), SURROGATES, ids=range(len(SURROGATES)))
async def test_half_of_a_surrogate_pair_is_refused_with_the_id_of_its_event(autojump_clock, clients, event, param):
    async with clients.realtime() as client:
        await client.websocket.send_message(json.dumps({**event, "event_id": "mine"}))
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"], error["event_id"]) == ("invalid_value", param, "mine")
        whole = json.dumps({"type": "session.update", "session": {"instructions": "😀"}})
        assert "\\ud83d" in whole
        await client.websocket.send_message(whole)
        assert (await client.until("session.updated"))["session"]["instructions"] == "😀"
