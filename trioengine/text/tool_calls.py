"""Tool calls in answers: the forms in which models write them, and a parser that follows an answer piece by piece.

A call is a JSON object with the tool's name and its arguments. Models write it between tags, or as their whole answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.core.grammar import Grammar


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes a call: between two tags, or, with empty ones, as its whole answer."""

    begin: str
    end: str
    arguments: str  # the member of the object that has the arguments

    def text_of(self, name: str, arguments: object) -> str:
        """Return a call as the model writes it."""
        return f"{self.begin}{json.dumps({'name': name, self.arguments: arguments})}{self.end}"

    def grammar(self, tools: Sequence[dict[str, Any]], *, is_single: bool) -> Grammar:
        """Return the grammar of an answer that calls one of the tools, or several of them unless `is_single`.

        A tool is {"name": …, "parameters": a schema or nothing}. Raises RequestRejected(code="invalid_grammar").
        """
        schema = {"anyOf": [self._schema(tool) for tool in tools]}
        return Grammar.json_between(schema, self.begin, self.end, is_single=is_single or not self.begin)

    def _schema(self, tool: dict[str, Any]) -> dict[str, Any]:
        properties = {"name": {"const": tool["name"]}, self.arguments: tool.get("parameters") or {"type": "object"}}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_PYTHON_TAG = "<|python_tag|>"
HERMES = ToolForm("<tool_call>\n", "\n</tool_call>", "arguments")
_LLAMA3_MARKS = (_PYTHON_TAG, '"parameters"')
FORMS = {"hermes": HERMES, "llama3": ToolForm("", "", "parameters"), "json": ToolForm("", "", "arguments")}


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of this tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest call: JSON, in pieces."""

    text: str


Part: TypeAlias = str | CallBegin | CallArguments  # a string is text beside calls
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


def form_of(template: str) -> ToolForm:
    """Return the form that a chat template asks for; hermes if it does not show one."""
    is_llama3 = "<tool_call>" not in template and any(mark in template for mark in _LLAMA3_MARKS)
    return FORMS["llama3"] if is_llama3 else HERMES


class ToolCallParser:
    """Splits an answer into text and calls. A part that only looks like a call is text."""

    def __init__(self, form: ToolForm) -> None:
        self._begin = form.begin.strip()
        self._end = form.end.strip()
        self._buffer = ""  # not given out
        self._in_call = False
        self._value: _JsonValue | None = None  # of the call's arguments, once they are given out
        self._is_first = True  # nothing was given out
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Return the parts that this piece of the answer completes."""
        self._buffer += text
        return [part for part in self._parts() if part != ""]

    def finish(self) -> list[Part]:
        """Return the rest, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._value is not None or not rest:
            return []
        if self._in_call:
            calls = list(self._whole(rest))
            return calls or [f"{self._begin}{rest}"]
        return [rest] if rest.strip() or not self.num_calls else []

    def _parts(self) -> Iterator[Part]:
        while True:
            before = len(self._buffer), self._in_call, self._value
            yield from self._arguments() if self._value is not None else self._call() if self._in_call else self._text()
            if (len(self._buffer), self._in_call, self._value) == before:
                return

    # ---- text -------------------------------------------------------------------------------------------------------

    def _text(self) -> Iterator[Part]:
        if not self._begin:
            yield from self._text_or_call()
            return
        text, tag, rest = self._buffer.partition(self._begin)
        if tag:
            self._buffer, self._in_call = rest, True
            if text.strip():
                yield self._given(text.rstrip())
            return
        held = _overlap(self._buffer, self._begin)
        held += len(self._buffer[: len(self._buffer) - held]) - len(self._buffer[: len(self._buffer) - held].rstrip())
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        if text:
            yield self._given(text)

    def _text_or_call(self) -> Iterator[Part]:
        """Without tags a call is the whole answer: its first character decides."""
        stripped = self._buffer.lstrip().removeprefix(_PYTHON_TAG).lstrip()
        if self._is_first and (not stripped or _PYTHON_TAG.startswith(stripped)):
            return
        if self._is_first and stripped.startswith("{"):
            self._buffer, self._in_call = stripped, True
            return
        text, self._buffer = self._buffer, ""
        yield self._given(text)

    def _given(self, text: str) -> str:
        self._is_first = False
        return text

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self) -> Iterator[Part]:
        if self._end and self._end in self._buffer and not _HEAD.match(self._buffer):
            inside, _, self._buffer = self._buffer.partition(self._end)
            self._in_call = False
            calls = list(self._whole(inside))
            yield from calls or [self._given(f"{self._begin}{inside}{self._end}")]
        elif head := _HEAD.match(self._buffer):
            self._buffer = self._buffer[head.end() :]
            self._value = _JsonValue()
            self.num_calls += 1
            self._is_first = False
            yield CallBegin(json.loads(head[1]))

    def _arguments(self) -> Iterator[Part]:
        assert self._value is not None
        count = self._value.take(self._buffer)
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        if text:
            yield CallArguments(text)
        if not self._value.is_complete:
            return
        closing = re.match(r"\s*\}\s*" + re.escape(self._end), self._buffer)
        if closing:
            self._buffer = self._buffer[closing.end() :]
            self._in_call, self._value = False, None

    def _whole(self, text: str) -> Iterator[Part]:
        """Yield the call in a text whose members are in another order; nothing if it is not one."""
        try:
            call = json.loads(text)
        except ValueError:
            return
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, dict):
            self.num_calls += 1
            self._is_first = False
            yield CallBegin(call["name"])
            yield CallArguments(json.dumps(arguments))


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text with which the tag begins."""
    return next((count for count in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-count:])), 0)


class _JsonValue:
    """How far an object of JSON has come."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """Return how many characters of the text belong to the value."""
        for index, character in enumerate(text):
            if self.is_complete:
                return index
            if self._in_string:
                self._in_string = character != '"' or self._is_escaped
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
        return len(text)
