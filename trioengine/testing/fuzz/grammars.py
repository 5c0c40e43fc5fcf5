"""The grammars of fuzzed programs, by name; each has a check of its own, which knows nothing of the compiler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.grammar import Grammar

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yes"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_CHOICES = ("no", "yes", "maybe so")
_WORDS = "([a-z]{1,4} ){2,8}[a-f]"
_NESTED = 'start: "(" start ")" | "[" start? "]" | /[a-c]/'
_UNKNOWN_RULE = 'start: "a" | nosuch'
_UNKNOWN_TOKEN = 'start: "a" <|nosuch|>'


def _is_nested(text: str) -> bool:
    while text[:1] + text[-1:] in ("()", "[]") and len(text) > 1:
        text = text[1:-1]
        if not text:
            return True
    return text in ("a", "b", "c")


def _is_object(text: str) -> bool:
    found = json.loads(text)
    return {*found} <= {"a", "b"} and found["a"] in (True, False) and found.get("b", "x") in ("x", "yes")


@dataclass(frozen=True)
class FuzzGrammar:
    """A grammar, the fields of a chat completion that stand for it, and whether a text is complete by it."""

    grammar: Grammar
    fields: Mapping[str, Any]
    is_complete: Callable[[str], bool]
    is_bad: bool = False  # it cannot be compiled


def _never(text: str) -> bool:
    return False


GRAMMARS: Mapping[str, FuzzGrammar] = {
    "choice": FuzzGrammar(
        Grammar.choice(_CHOICES), {"structured_outputs": {"choice": _CHOICES}}, lambda text: text in _CHOICES
    ),
    "words": FuzzGrammar(
        Grammar.regex(_WORDS),
        {"structured_outputs": {"regex": _WORDS}},
        lambda text: re.fullmatch(_WORDS, text) is not None,
    ),
    "object": FuzzGrammar(
        Grammar.json_schema(_SCHEMA),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        _is_object,
    ),
    "nested": FuzzGrammar(Grammar.lark(_NESTED), {"structured_outputs": {"grammar": _NESTED}}, _is_nested),
    "unknown rule": FuzzGrammar(
        Grammar.lark(_UNKNOWN_RULE), {"structured_outputs": {"grammar": _UNKNOWN_RULE}}, _never, is_bad=True
    ),
    "unknown token": FuzzGrammar(  # only the worker's compiler, which has the vocabulary, notices that
        Grammar.lark(_UNKNOWN_TOKEN), {"structured_outputs": {"grammar": _UNKNOWN_TOKEN}}, _never, is_bad=True
    ),
}
NAMES = (*("choice", "words", "words", "words", "object", "object", "nested"), "unknown rule", "unknown token")
GOOD = ("words", "words", "object", "nested")
_OF: Mapping[Grammar | None, FuzzGrammar] = {each.grammar: each for each in GRAMMARS.values()}


def is_bad(grammar: Grammar | None) -> bool:
    """Whether a request with it is refused with the code `invalid_grammar`; those that stand for tools are not."""
    return grammar in _OF and _OF[grammar].is_bad


def is_complete(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole answer by the grammar."""
    return _OF[grammar].is_complete(text)
