"""Answers that follow schemas are valid by them, as another library judges; and grammars beyond the limits."""

import json
import random
import re

import pytest
from helpers.json_schemas import make_schema
from jsonschema import Draft202012Validator

from trioengine import Grammar, RequestRejected
from trioengine.core.grammar import GrammarFailed
from trioengine.testing.toy_grammar import toy_compile
from trioengine.testing.toy_model import END_OF_TEXT, IM_END

SCHEMAS = 300
ANSWERS = 3  # of each schema
PATIENCE = 150  # tokens; then an answer hurries to its end
MAX_TOKENS = 1500
ENDING = [IM_END, END_OF_TEXT, *b'"}]']


def allowed_tokens(mask):
    return [number * 8 + bit for number, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def write_answer(matcher, rng):
    """Return an answer of random tokens, or None if it becomes too long."""
    output = []
    while not matcher.is_complete and len(output) < MAX_TOKENS:
        tokens = allowed_tokens(matcher.allowed())
        ending = [token for token in ENDING if token in tokens]
        hurry = len(output) > PATIENCE or rng.random() < 0.25
        output.append(ending[0] if ending and hurry else rng.choice(tokens))
        matcher.advance(output)
    if not matcher.is_complete:
        return None
    return bytes(token for token in output if token < 256).decode()


def is_loose_time(error):
    """The compiler lets every minute have a second 60, and every year a 29th of February."""
    is_time = error.validator == "format" and error.validator_value in ("date-time", "time", "date")
    return is_time and re.search(":60|-02-29", error.instance) is not None


def causes(errors):
    """Return the innermost errors: of unions, those of their alternatives."""
    for error in errors:
        yield from causes(error.context) if error.context else [error]


def test_answers_are_valid_by_their_schemas():
    finished, refused = 0, []
    for seed in range(SCHEMAS):
        schema = make_schema(seed)
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        try:
            grammar = Grammar.json_schema(schema)
            texts = [write_answer(toy_compile(grammar), random.Random(f"{seed} {number}")) for number in range(ANSWERS)]
        except (RequestRejected, GrammarFailed) as exc:
            refused.append(str(exc))
            continue
        for text in filter(None, texts):
            finished += 1
            errors = list(validator.iter_errors(json.loads(text)))
            is_valid = all(any(map(is_loose_time, causes([error]))) for error in errors)
            assert is_valid, f"schema {seed} {json.dumps(schema)}: {text!r}: {errors}"
    assert finished > 0.8 * SCHEMAS * ANSWERS
    assert len(refused) < 0.12 * SCHEMAS
    reasons = "Unimplemented keys|nsatisfiable|min/maxProperties only|it is too complex|circular ref|cannot be enforced"
    assert all(re.search(reasons, message) for message in refused), refused


NARROW = [
    {"exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": -2},
    {"allOf": [{"exclusiveMinimum": 3.0}, {"exclusiveMaximum": 3.25}]},
    {"anyOf": [{"exclusiveMinimum": 1}, {"type": "null"}], "maximum": 1.5},
    {"$ref": "#/$defs/a", "maximum": 1.5, "$defs": {"a": {"exclusiveMinimum": 1}}},
]
WIDE = [
    {"exclusiveMinimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0.5, "maximum": 0.75},
    {"minimum": 0.5, "exclusiveMaximum": 1},
    {"exclusiveMinimum": -2, "maximum": -1.5},
    {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
    {"exclusiveMinimum": True, "maximum": 0.5, "anyOf": [{}]},
]


def test_bounds_that_would_not_be_enforced_are_refused():
    for schema in NARROW:
        with pytest.raises(RequestRejected, match=r"exclusiveM\w+imum cannot be enforced for -?\d "):
            Grammar.json_schema(schema)
    for schema in WIDE:
        Grammar.json_schema(schema)


def chain(length):
    """A schema whose references lead from each definition to the next one."""
    definitions = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}


def rules(length):
    return "start: r0\n" + "\n".join(f'r{number}: r{number + 1} "b"' for number in range(length)) + f'\nr{length}: "a"'


HUGE = [
    (lambda: Grammar.json_schema(chain(2000)), "2001 references .* can lead 8001 levels deep; at most 1000 are"),
    (lambda: Grammar.json_schema({"not": {"$id": "a", **chain(200)}}), "201 references .* can lead 2004 levels deep"),
    (lambda: Grammar.json_schema({"multipleOf": 7919000}), "multipleOf are 7919000 together"),
    (lambda: Grammar.json_schema({"multipleOf": 1.00003}), "multipleOf are 100003 together"),
    (lambda: Grammar.json_schema({"enum": ["x" * 10_000_000]}), "has 10000140 characters; at most 65536 are"),
    (lambda: Grammar.json_schema({"enum": [[]] * 1_000_000}), "the schema has more than 65536 characters"),
    (lambda: Grammar.lark(rules(8000)), "8002 definitions and groups; at most 500 are"),
    (lambda: Grammar.lark("start: " + "(" * 501 + '"a"' + ")" * 501), "502 definitions and groups"),
    (lambda: Grammar.lark('start: %json {"multipleOf": 7919000}'), "cannot hold a schema"),
]


@pytest.mark.parametrize(("make", "message"), HUGE, ids=range(len(HUGE)))
def test_grammars_that_a_compiler_would_not_survive_are_refused(make, message):
    with pytest.raises(RequestRejected, match=message) as refused:
        make()
    assert refused.value.code == "invalid_grammar"


def test_sizes_that_are_accepted():
    for multiple in (0.01, 1e-9, 1, 10_000, 1_000_000, 0.25, 1e300, True, "a", -5):
        Grammar.json_schema({"multipleOf": multiple})
    for grammar in (Grammar.json_schema(chain(19)), Grammar.lark(rules(400))):
        toy_compile(grammar)


COMPLEX = [
    Grammar.regex("((((a{100}){100}){100}){100})"),
    Grammar.regex("a{1000000000}"),
    Grammar.regex("a?" * 2000 + "a" * 2000),
    Grammar.lark('start: "a" start'),
    Grammar.lark("start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(30)) + '\nT30: "a"'),
    Grammar.json_schema({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in (0, 1)]} for i in range(20)]}),
]


@pytest.mark.parametrize("grammar", COMPLEX, ids=range(len(COMPLEX)))
def test_grammars_that_are_too_complex(grammar):
    with pytest.raises((RequestRejected, GrammarFailed), match="it is too complex; use fewer or simpler patterns"):
        write_answer(toy_compile(grammar), random.Random(0))


def test_a_schema_that_nothing_matches():
    with pytest.raises(RequestRejected, match=r"^grammar: nothing can match it$"):
        toy_compile(Grammar.json_schema({"$ref": "#"}))


def test_a_token_is_forced_where_it_is_the_only_one():
    matcher, output = toy_compile(Grammar.regex("ab[cd]e")), []
    for token, expected in zip(b"abce", [ord("a"), ord("b"), None, ord("e")], strict=True):
        assert matcher.forced() == expected
        assert (allowed_tokens(matcher.allowed()) == [expected]) is (expected is not None)
        output.append(token)
        matcher.advance(output)
    assert matcher.is_complete


def test_a_grammar_that_fails_forces_nothing():
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    matcher, output = toy_compile(Grammar.json_schema(endless)), []
    while (token := matcher.forced()) is not None:
        output.append(token)
        matcher.advance(output)
    with pytest.raises(GrammarFailed):
        matcher.allowed()
