"""JSON of clients, and its depth; no input leads to an internal error."""

import json

import pytest
from helpers.clients import CHAT, chat, open_clients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioengine.serve.chat_request import HARMLESS
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import MAX_DEPTH, load_object


def nested(depth, opening="[", closing="]"):
    """JSON of a value that is so deep."""
    return opening * depth + ("" if opening == "[" else "1") + closing * depth


def within(value):
    return f'{{"a": {value}}}'


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_depth(opening, closing):
    load_object(within(nested(MAX_DEPTH - 1, opening, closing)), "the body")
    for depth in (MAX_DEPTH, 500, 2000, 100_000):
        with pytest.raises(ClientError, match=f"the body is nested deeper than {MAX_DEPTH} levels"):
            load_object(within(nested(depth, opening, closing)), "the body")


NOT_JSON = [
    ("", "the body is empty"),
    (b" \n", "the body is empty"),
    ('{"a": 1,\n "b" 2}', "the body is not JSON: line 2, column 6"),
    ("{} {}", "the body is not JSON: line 1, column 4"),
    ('{"a": NaN}', "the body is not JSON: NaN is not a JSON number"),
    (f'{{"a": {"1" * 5000}}}', "the body is not JSON"),
]


@pytest.mark.parametrize(("data", "message"), NOT_JSON)
def test_where_it_is_not_json(data, message):
    with pytest.raises(ClientError) as refused:
        load_object(data, "the body")
    assert (refused.value.problem.code, refused.value.problem.message) == ("invalid_json", message)


def test_many_are_not_deep():
    assert len(load_object(json.dumps({"a": [{"b": [[]]}] * 10_000}), "the body")["a"]) == 10_000


CHAT_FIELDS = (
    *("messages", "model", "stream", "stream_options", "metadata", "logprobs", "top_logprobs", "user", "n"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens"),
    *("ignore_eos", "logit_bias", "skip_special_tokens", "response_format", "tools", "tool_choice", "modalities"),
    *("max_completion_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "service_tier"),
    *("store", "safety_identifier", "prompt_cache_key", "request_id", "num_speculative_tokens"),
)
ITEM = ("item", ("id", "object", "type", "status", "role", "content"))
SESSION = ("instructions", "max_output_tokens", "temperature", "stop", "logit_bias", "tools", "type", "truncation")
EVENTS = {
    "session.update": ("session", SESSION),
    "conversation.item.create": ITEM,
    "conversation.item.retrieve": ("item_id", ()),
    "conversation.item.truncate": ("text_end", ()),
    "conversation.item.delete": ("item_id", ()),
    "response.create": ("response", ("conversation", "input", "metadata", "instructions", "seed", "output_modalities")),
    "response.cancel": ("response_id", ()),
}


COMPLETION_FIELDS = (
    *("prompt", "model", "stream", "stream_options", "logprobs", "echo", "n", "best_of", "user", "suffix"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens"),
    *("ignore_eos", "logit_bias", "structured_outputs", "response_format", "return_token_ids", "request_id"),
    *("presence_penalty", "add_special_tokens", "return_tokens_as_token_ids", "timings_per_token"),
)
TOKENIZE_FIELDS = ("prompt", "messages", "add_special_tokens", "return_token_strs", "tools", "add_generation_prompt")
FIELDS = {
    CHAT: CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": ("tokens",),
    "/abort_request": ("request_id", "abort_all"),
}
BODIES = {CHAT: chat(), "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 0}}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in FIELDS.items() for field in fields])
async def test_deep_values_of_a_field(autojump_clock, clients, caplog, path, field):
    """At the depths where Python reads a value that it cannot show, too."""
    async with clients.connect() as client:
        for depth in (60, *range(930, 940)):
            body = json.dumps({**BODIES.get(path, {}), field: "here"}).replace('"here"', nested(depth))
            answer = await client.request("POST", path, body.encode())
            if answer.status != 200 or depth > MAX_DEPTH or (field not in HARMLESS and path == CHAT):
                assert answer.status in (400, 404), answer.body
                assert answer.error["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if "has no effect" not in record.getMessage()]


async def test_deep_values_of_events(autojump_clock, clients, caplog):
    async with clients.realtime() as client:
        for name, (field, inner) in EVENTS.items():
            for value in ("here", *({part: "here"} for part in inner)):
                for depth in (60, 940, 944):
                    event = json.dumps({"type": name, "item_id": "x", "content_index": 0, field: value})
                    await client.websocket.send_message(event.replace('"here"', nested(depth)))
                    assert (await client.until("error"))["error"]["type"] == "invalid_request_error"
    assert not caplog.records


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from((0, 1, -1, 2**31, 2**63, 10**400)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(("", "x", "auto", "none", "user", "message", "text", "input_text", "root", "inf", "\ud800")),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "text", "role", "content", "id", "1", "")), inner, max_size=3)
    ),
    max_leaves=6,
)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def objects(names):
    return st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=4)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@FEW
@given(data=st.data())
async def test_any_fields_of_a_request(autojump_clock, path, data):
    """The answer, or a refusal that names one of the fields; the connection goes on."""
    fields = data.draw(objects(FIELDS[path]))
    async with open_clients() as clients, clients.connect() as client:
        answer = await client.request("POST", path, {**BODIES[path], **fields})
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            assert answer.error["param"].partition(".")[0].partition("[")[0] in fields
        assert (await client.request("GET", "/health")).status == 200


@FEW
@given(path=st.sampled_from(("/tokenize", "/detokenize", "/abort_request")), data=st.data())
async def test_any_fields_of_the_other_routes(autojump_clock, path, data):
    names = sorted({name for each in ("/tokenize", "/detokenize", "/abort_request") for name in FIELDS[each]})
    async with open_clients() as clients:
        answer = await clients.request("POST", path, data.draw(objects(names)))
        assert answer.status in (200, 400), answer.body
        assert answer.status == 200 or answer.error["param"]


@FEW
@given(name=st.sampled_from(tuple(EVENTS)), data=st.data())
async def test_any_fields_of_an_event(autojump_clock, name, data):
    """Done, or refused in the name of a field; the connection goes on."""
    field, inner = EVENTS[name]
    fields = data.draw(objects((field, "event_id", "item_id", "content_index", "previous_item_id")))
    if inner and data.draw(st.booleans()):
        fields[field] = data.draw(objects(inner))
    async with open_clients() as clients, clients.realtime() as client:
        await client.websocket.send_message(json.dumps({"type": name, **fields}))
        await client.send("conversation.item.retrieve", item_id="last", event_id="last")
        while (error := (await client.until("error"))["error"])["event_id"] != "last":
            assert error["type"] == "invalid_request_error", error
            assert error["param"] or error["code"] == "empty_conversation", error
