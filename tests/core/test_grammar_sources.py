"""Grammars before they are compiled: their sources, their checks and their limits."""

import json
import re

import pytest

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.grammar_limits import check_schema


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_sources():
    (schema,) = json.loads(Grammar.json_schema({"type": "object"}).source)["grammars"]
    assert schema["json_schema"]["type"] == "object"
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})
    for grammar, start in (
        (Grammar.regex("a/b\n"), "start: /a\\/b\\n/"),
        (Grammar.choice(["a", 'b"']), 'start: "a" | "b\\""'),
        (Grammar.lark('start: "a"'), 'start: "a"'),
    ):
        assert json.loads(grammar.source)["grammars"] == [{"lark_grammar": start}]
    for begin, end, is_single, start in (
        ("<", ">", True, 'start: "<" value ">"\n'),
        ("<", ">", False, 'start: "<" value ">" ("\\n" "<" value ">")*\n'),
        ("", "", True, "start: value\n"),
    ):
        source = Grammar.json_between({}, begin, end, is_single=is_single).source
        assert json.loads(source)["grammars"][0]["lark_grammar"].startswith(start)


REFUSED = [
    (lambda: Grammar.json_schema("{}"), "a schema must be an object"),
    (lambda: Grammar.json_schema({"a": {1, 2}}), "the grammar is not JSON"),
    (lambda: Grammar.regex(b"a"), "a regular expression must be a string"),
    (lambda: Grammar.choice("yes"), "choices must be a list"),
    (lambda: Grammar.choice([]), "choices must be a list"),
    (lambda: Grammar.choice(["a", 1]), "choices must be strings"),
    (lambda: Grammar.lark(" "), "a grammar must be a text"),
    (lambda: Grammar.lark("start: %json {}"), "a grammar cannot hold a schema"),
    (lambda: Grammar.lark("(" * 600), "the grammar has 600 definitions and groups"),
    (lambda: Grammar.regex("a" * (1 << 18)), "the grammar has 262189 characters"),
    (lambda: Grammar.json_schema(nested(65)), "the schema is nested deeper"),
    (lambda: Grammar.json_schema({"enum": [[]] * 40_000}), "the schema has more than"),
    (lambda: Grammar.json_schema({"multipleOf": 123_450}), "the values of multipleOf are"),
    (
        lambda: Grammar.json_schema(
            {"$defs": {f"d{index}": {"items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(400)}}
        ),
        "the schema's 400 references",
    ),
    (lambda: Grammar.json_schema({"exclusiveMinimum": 0, "maximum": 0.5}), "exclusiveMinimum cannot be enforced"),
    (lambda: Grammar.json_schema({"minimum": -2.5, "exclusiveMaximum": -2}), "exclusiveMaximum cannot be enforced"),
    (
        lambda: Grammar.json_schema({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}),
        "exclusiveMinimum cannot be enforced",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(make, message):
    with pytest.raises(RequestRejected, match="^" + re.escape(message)) as refused:
        make()
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "grammar")


def test_schemas_within_the_limits():
    for schema in (
        {"multipleOf": 0.01},
        {"multipleOf": True},
        {"multipleOf": 0.25},
        {"exclusiveMinimum": 0, "maximum": 2},
        {"anyOf": [{"exclusiveMinimum": True}], "minimum": 1},
        {"$id": "a", "items": {"$ref": "#", "id": "b"}},
        {"$ref": 3, "prefixItems": [[1], {}]},
    ):
        check_schema(schema)
