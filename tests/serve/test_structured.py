"""Chat completions whose answers follow a grammar: OpenAI's and vLLM's fields, and their refusals."""

import json
import re

import pytest
from helpers.clients import CHAT, chat

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
IS_PERSON = r'\{"name": "[^"]{0,8}", "old": (true|false)\}'
FORMS = [
    ({"response_format": FORMAT}, IS_PERSON),
    ({"structured_outputs": {"json": SCHEMA}}, IS_PERSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}, "response_format": {"type": "text"}}, IS_PERSON),
    ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
    ({"structured_outputs": {"choice": ["yes", "no"], "json_object": False}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-c]{3}/ ">"'}}, "<[a-c]{3}>"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=range(len(FORMS)))
async def test_answers_follow_the_grammar(autojump_clock, clients, fields, pattern):
    choice = (await clients.chat(max_tokens=200, ignore_eos=False, **fields)).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["message"]["content"])
    answer = await clients.chat(max_tokens=200, ignore_eos=False, stream=True, **fields)
    deltas = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
    assert "".join(deltas) == choice["message"]["content"]


async def test_any_json_object(autojump_clock, clients):
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        text = (await clients.chat(max_tokens=20, **fields)).json["choices"][0]["message"]["content"]
        assert text.startswith("{")


REFUSED = [
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "missing_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "invalid_type",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "invalid_grammar",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "invalid_grammar", "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: <|nosuch|>"}}, "invalid_grammar", "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "invalid_json", None),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "invalid_value", "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_grammars_that_are_refused(autojump_clock, clients, fields, code, param):
    for stream in (False, True):
        answer = await clients.request("POST", CHAT, chat(stream=stream, **fields))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
        assert param is None or answer.error["message"].startswith(param)
