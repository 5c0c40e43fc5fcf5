"""Grammars that answers have to follow: JSON of a schema, a regular expression, a choice, or a context-free grammar.

The library llguidance compiles them; a grammar is made here in its form, and is not checked yet.
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioengine.core.grammar_limits import check_lark, check_schema, check_size, invalid
from trioengine.core.wording import brief


class GrammarFailed(Exception):
    """A grammar turns out to be too complex while an answer follows it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar; make one by a class method. Each raises RequestRejected(code="invalid_grammar")."""

    source: str = field(repr=False)  # llguidance's JSON

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that is valid by the schema, without unlisted properties unless the schema allows them."""
        return cls._of({"json_schema": _checked_schema(schema)})

    @classmethod
    def json_between(cls, schema: Mapping[str, Any], begin: str, end: str, *, is_single: bool) -> Grammar:
        """JSON that is valid by the schema, between two texts; on several lines as well unless `is_single`."""
        value = _dumped(_checked_schema(schema))
        one = f"{json.dumps(begin)} value {json.dumps(end)}" if begin or end else "value"
        several = one if is_single else f'{one} ("\\n" {one})*'
        return cls._of({"lark_grammar": f"start: {several}\nvalue: %json {value}"})

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that the regular expression matches as a whole, in the syntax of Rust's regex."""
        if not isinstance(pattern, str):
            raise invalid(f"a regular expression must be a string, got {brief(pattern)}")
        escaped = _PIECE.sub(lambda piece: _ESCAPED.get(piece[0], piece[0]), pattern)
        return cls._of({"lark_grammar": f"start: /{escaped}/"})

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices or "" in choices:
            raise invalid(f"choices must be a list of at least one text, and none empty, got {brief(choices)}")
        if not all(isinstance(choice, str) for choice in choices):
            raise invalid(f"choices must be strings, got {brief(choices)}")
        return cls._of({"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))})

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A text by a grammar in llguidance's variant of Lark's syntax, whose first rule is `start`."""
        if not isinstance(grammar, str) or not grammar.strip():
            raise invalid(f"a grammar must be a text, got {brief(grammar)}")
        check_lark(grammar)
        return cls._of({"lark_grammar": grammar})

    @classmethod
    def _of(cls, grammar: Mapping[str, Any]) -> Grammar:
        source = _dumped({"grammars": [grammar]})
        check_size(source)
        return cls(source)


_PIECE = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPED = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}  # slashes enclose a regular expression, which is on one line
# Whitespace as json.dumps writes it: a model that may write any amount of it sometimes writes nothing else.
_GUIDANCE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def _checked_schema(schema: object) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise invalid(f"a schema must be an object, got {brief(schema)}")
    check_schema(schema)
    return {**schema, "x-guidance": _GUIDANCE}


def _dumped(grammar: Mapping[str, Any]) -> str:
    try:
        return json.dumps(grammar)
    except (TypeError, ValueError) as exc:
        raise invalid(f"the grammar is not JSON: {exc}") from None
