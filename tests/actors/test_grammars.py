"""Answers that follow a grammar: whole, cut, resumed, aborted while it compiles; and grammars that are refused."""

import json
import re

import pytest
import trio

from trioengine import FinishReason, Grammar, RequestRejected, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
PERSON = Grammar.json_schema(SCHEMA)


async def ask(engine, grammar, **options):
    return await engine.generate("hello", grammar=grammar, **{"max_tokens": 200, **options})


async def test_json_of_a_schema(autojump_clock, simulated):
    engine, _ = simulated
    completion = await ask(engine, PERSON)
    found = json.loads(completion.text)
    assert found.keys() == {"name", "old"} and isinstance(found["old"], bool)
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[0-9]{3}/[xyz]+!"), "[0-9]{3}/[xyz]+!"),
        (Grammar.choice(["yes", "no", 'a "b"\n']), 'yes|no|a "b"\n'),
        (Grammar.lark('start: "<" word ("," word){0,3} ">"\nword: /[a-z]{2,3}/'), "<[a-z]{2,3}(,[a-z]{2,3}){0,3}>"),
    ],
)
async def test_other_grammars(autojump_clock, simulated, grammar, pattern):
    engine, _ = simulated
    completion = await ask(engine, grammar)
    assert re.fullmatch(pattern, completion.text)
    assert completion.finish_reason is FinishReason.STOP


async def test_a_complete_answer_ends_without_an_end_token(autojump_clock, simulated):
    """Also where the parameters want more."""
    engine, _ = simulated
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        completion = await ask(engine, Grammar.choice(["yes"]), **options)
        assert (completion.text, completion.finish_reason) == ("yes", FinishReason.STOP)
        assert completion.usage.completion_tokens == 3


def test_the_form_of_json_is_not_the_schemas_to_choose():
    source = Grammar.json_schema({"type": "object", "x-guidance": {"lenient": True}}).source
    assert "lenient" not in source


async def test_an_answer_that_is_cut(autojump_clock, simulated):
    engine, _ = simulated
    completion = await ask(engine, PERSON, max_tokens=5)
    assert completion.finish_reason is FinishReason.LENGTH
    assert '{"name": "'.startswith(completion.text)


async def test_an_answer_goes_on_with_the_next_worker(autojump_clock, simulated):
    engine, simulation = simulated
    whole = (await ask(engine, PERSON)).text
    async with (
        engine.open_session() as session,
        session.generate("hello", grammar=PERSON, max_tokens=200) as generation,
    ):
        text = ""
        async for chunk in generation:
            text += chunk.text
            if len(text) == 9:
                simulation.worker.kill()
        assert text == whole


BAD = [
    Grammar.regex("(a"),
    Grammar.lark('start: "a" b'),
    Grammar.lark('start: "a" <|nosuch|>'),  # which only the worker's compiler notices
    Grammar.json_schema({"type": "nothing"}),
    Grammar.json_schema({"type": "object", "unevaluatedProperties": False, "not": {"type": "string"}}),
]


@pytest.mark.parametrize("grammar", BAD, ids=range(len(BAD)))
async def test_grammars_that_cannot_be_compiled(autojump_clock, simulated, grammar):
    engine, _ = simulated
    with pytest.raises(RequestRejected, match=r"^grammar: ") as refused:
        await ask(engine, grammar)
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "grammar")
    await engine.check_invariants()
    assert (await ask(engine, PERSON)).finish_reason is FinishReason.STOP


NO_GRAMMARS = [
    (lambda: Grammar.json_schema("{}"), "a schema must be an object, got '{}'"),
    (lambda: Grammar.json_schema({"a": {1, 2}}), "the grammar is not JSON"),
    (lambda: Grammar.regex(b"a"), "a regular expression must be a string, got b'a'"),
    (lambda: Grammar.choice("yes"), "choices must be a list of at least one text"),
    (lambda: Grammar.choice([]), "choices must be a list of at least one text"),
    (lambda: Grammar.choice(["a", 1]), "choices must be strings"),
    (lambda: Grammar.lark(" "), "a grammar must be a text, got ' '"),
    (lambda: Grammar.regex("a" * (1 << 18)), "the grammar has 262189 characters; at most 65536 are accepted"),
    (lambda: Grammar.json_schema(nested(65)), "the schema is nested deeper than 64 levels"),
    (lambda: SamplingParams(grammar="a"), "grammar must be a Grammar, got 'a'"),
]


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(("make", "message"), NO_GRAMMARS, ids=range(len(NO_GRAMMARS)))
def test_values_that_are_no_grammars(make, message):
    with pytest.raises(RequestRejected, match="^" + re.escape(message)):
        make()


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", r"a\\/b", "a\nb", "a\\\nb", "[/]"])
async def test_slashes_and_line_ends_in_regular_expressions(autojump_clock, simulated, pattern):
    engine, _ = simulated
    assert re.fullmatch(pattern, (await ask(engine, Grammar.regex(pattern))).text)


async def test_an_abort_while_the_grammar_is_checked(autojump_clock, simulated):
    engine, simulation = simulated
    simulation.thread_passes = 50
    with trio.move_on_after(0) as scope:
        await ask(engine, PERSON)
    assert scope.cancelled_caught
    await engine.check_invariants()
    assert engine.statistics().sessions == 0


async def test_a_known_grammar_is_not_checked_again(autojump_clock, simulated, monkeypatch):
    engine, _ = simulated
    await ask(engine, PERSON)

    async def fail(*_):
        raise AssertionError("it is checked again")

    monkeypatch.setattr(engine.runtime.grammars._ports.__class__, "run_in_thread", fail, raising=False)
    assert (await ask(engine, Grammar.json_schema(SCHEMA))).finish_reason is FinishReason.STOP


async def test_a_grammar_that_fails_during_the_answer_ends_its_request_alone(autojump_clock, simulated):
    """Objects without an end: each has to hold another one."""
    engine, simulation = simulated
    endless = Grammar.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    pid = simulation.worker.pid
    async with engine.open_session() as session, session.generate("hello", max_tokens=100) as other:
        with pytest.raises(RequestRejected, match=r"^grammar: it is too complex; use fewer") as failed:
            await ask(engine, endless)
        assert failed.value.code == "invalid_grammar"
        await other.result()
    assert simulation.worker.pid == pid
    await engine.check_invariants()
    assert (await ask(engine, PERSON)).finish_reason is FinishReason.STOP
