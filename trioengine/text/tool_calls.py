"""Tool calls in answers: the forms in which models write them, and a parser that follows an answer piece by piece.

A call is a JSON object with the tool's name and its arguments. Models write it between tags, or as their whole answer.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.core.grammar import Grammar
from trioengine.core.tools import JsonObject
from trioengine.text.stop_strings import overlap


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes a call: between two tags, or, with empty ones, as its whole answer."""

    begin: str
    end: str
    arguments: str  # the member of the object that has the arguments

    def text_of(self, name: str, arguments: object) -> str:
        """Return a call as the model writes it."""
        return f"{self.begin}{json.dumps({'name': name, self.arguments: arguments})}{self.end}"

    def text_of_call(self, call: Any) -> str:
        """Return an entry of `tool_calls` as the model writes it; an unknown one as its JSON, between the same tags."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function:
            return self.text_of(function["name"], function["arguments"])
        return f"{self.begin}{json.dumps(call)}{self.end}"

    def grammar(self, tools: Sequence[dict[str, Any]], *, is_single: bool) -> Grammar:
        """Return the grammar of an answer that calls one of the tools, or several of them unless `is_single`.

        A tool is {"name": …, "parameters": a schema or nothing}. Raises RequestRejected(code="invalid_grammar").
        """
        schema = {"anyOf": [self._schema(tool, f"#/anyOf/{index}") for index, tool in enumerate(tools)]}
        return Grammar.json_between(schema, self.begin, self.end, is_single=is_single or not self.begin)

    def _schema(self, tool: dict[str, Any], place: str) -> dict[str, Any]:
        """Return the schema of a call, which is at this place in the whole schema."""
        parameters = _moved(tool.get("parameters") or {"type": "object"}, f"{place}/properties/{self.arguments}")
        properties = {"name": {"const": tool["name"]}, self.arguments: parameters}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_PYTHON_TAG = "<|python_tag|>"
HERMES = ToolForm("<tool_call>\n", "\n</tool_call>", "arguments")
_LLAMA3_MARKS = (_PYTHON_TAG, '"parameters"')
FORMS = {"hermes": HERMES, "llama3": ToolForm("", "", "parameters"), "json": ToolForm("", "", "arguments")}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to its own parts hold when it is at this place of another one."""
    if isinstance(schema, dict):
        moved = {name: _moved(value, place) for name, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
        return moved
    return [_moved(value, place) for value in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of this tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest call: JSON, in pieces."""

    text: str


Part: TypeAlias = str | CallBegin | CallArguments  # a string is text beside calls
_MAX_HEAD = 256  # characters of a call before its arguments; a longer one is read when it is whole
_BETWEEN = " \t\r\n;,"  # calls without tags
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


def form_of(template: str) -> ToolForm:
    """Return the form that a chat template asks for; hermes if it does not show one."""
    is_llama3 = "<tool_call>" not in template and any(mark in template for mark in _LLAMA3_MARKS)
    return FORMS["llama3"] if is_llama3 else HERMES


class _State(enum.Enum):
    """The place of an answer's next character."""

    TEXT = enum.auto()
    HEAD = enum.auto()  # of a call: its name is not known
    WHOLE = enum.auto()  # in a call that is read when it is whole
    ARGUMENTS = enum.auto()  # in the arguments of a call that was given out
    TAIL = enum.auto()  # behind the arguments


class ToolCallParser:
    """Splits an answer into text and calls. A part that only looks like a call is text; no text is lost."""

    def __init__(self, form: ToolForm) -> None:
        self._begin = form.begin.strip()
        self._end = form.end.strip()
        self._state = _State.TEXT
        self._buffer = ""  # not given out
        self._searched = 0  # characters of the buffer in which the end does not begin
        self._space = ""  # white space before the call, which is text if no call follows
        self._has_text = False  # some was given out
        self._value = JsonObject()  # the arguments
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Return the parts that this piece of the answer completes."""
        self._buffer += text
        while self._step():
            pass
        return self._take_parts()

    def finish(self, *, is_aborted: bool = False) -> list[Part]:
        """Return the rest, at the end of the answer; not the beginning of a call that was aborted."""
        rest, self._buffer = self._buffer, ""
        if is_aborted and self._state in (_State.HEAD, _State.WHOLE):
            return self._take_parts()
        inside = rest[: len(rest) - overlap(rest, self._end)]  # without an end tag that is cut
        if self._state in (_State.HEAD, _State.WHOLE):
            self._give_whole(inside, self._space + self._begin + rest)
        elif self._state is _State.TAIL and (behind := inside.partition("}")[2]).strip():
            self._give_text(behind)
        elif self._state is _State.TEXT and (rest.strip() or not self.num_calls):
            self._give_text(rest)
        return self._take_parts()

    @property
    def is_cut(self) -> bool:
        """Whether the answer has ended within the arguments of a call."""
        return self._state is _State.ARGUMENTS

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _step(self) -> bool:
        """Go on with the buffer; False if that needs more of the answer."""
        match self._state:
            case _State.TEXT:
                return self._step_text() if self._begin else self._step_text_without_tags()
            case _State.HEAD:
                return self._step_head()
            case _State.WHOLE:
                return self._step_whole()
            case _State.ARGUMENTS:
                return self._step_arguments()
            case _State.TAIL:
                return self._step_tail()

    def _turn_to(self, state: _State, rest: str) -> bool:
        self._state, self._buffer, self._searched = state, rest, 0
        return True

    # ---- text -------------------------------------------------------------------------------------------------------

    def _step_text(self) -> bool:
        text, tag, rest = self._buffer.partition(self._begin)
        if tag:
            self._give_text_before_call(text)
            return self._turn_to(_State.HEAD, rest)
        ready = text[: len(text) - overlap(text, self._begin)].rstrip()
        self._give_text(ready)
        self._buffer = text[len(ready) :]
        return False

    def _step_text_without_tags(self) -> bool:
        """A call is the whole answer, or follows another one: the first character decides."""
        call = self._buffer.lstrip(_BETWEEN if self.num_calls else None).removeprefix(_PYTHON_TAG).lstrip()
        if not self._has_text and (not call or _PYTHON_TAG.startswith(call)):
            return False
        if not self._has_text and call.startswith("{"):
            self._space = self._buffer[: len(self._buffer) - len(call)]
            return self._turn_to(_State.HEAD, call)
        self._give_text(self._buffer)
        self._buffer = ""
        return False

    def _give_text_before_call(self, text: str) -> None:
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._give_text(shown)

    def _give_text(self, text: str) -> None:
        if text:
            self._has_text = True
            self._parts.append(text)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _step_head(self) -> bool:
        if (head := _HEAD.match(self._buffer)) is not None:
            if (name := _loaded(head[1])) is None:
                return self._turn_to(_State.WHOLE, self._buffer)
            self._value = JsonObject()
            self._begin_call(str(name))
            return self._turn_to(_State.ARGUMENTS, self._buffer[head.end() :])
        if len(self._buffer) > _MAX_HEAD or (self._end and self._end in self._buffer):
            return self._turn_to(_State.WHOLE, self._buffer)
        return False

    def _step_whole(self) -> bool:
        place = self._find_end()
        if place < 0:
            return False
        inside, rest = self._buffer[:place], self._buffer[place + len(self._end) :]
        self._give_whole(inside, f"{self._space}{self._begin}{inside}{self._end}")
        return self._turn_to(_State.TEXT, rest)

    def _find_end(self) -> int:
        """Return the place of the end tag, which is not searched for twice in the same text; -1 if it is not there."""
        place = self._buffer.find(self._end, self._searched) if self._end else -1
        self._searched = max(0, len(self._buffer) - len(self._end) + 1)
        return place

    def _give_whole(self, inside: str, text: str) -> None:
        """Give out the call in this JSON, whatever the order of its members; or else the text."""
        call = _loaded(inside)
        arguments = _arguments(call)
        if arguments is None:
            self._give_text(text)
        else:
            self._begin_call(call["name"])
            self._parts.append(CallArguments(arguments))

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._parts.append(CallBegin(name))

    def _step_arguments(self) -> bool:
        count = self._value.take(self._buffer)
        if count:
            self._parts.append(CallArguments(self._buffer[:count]))
        self._buffer = self._buffer[count:]
        return self._value.is_complete and self._turn_to(_State.TAIL, self._buffer)

    def _step_tail(self) -> bool:
        """The rest of the call's object, which has nothing to say, up to the end tag or the closing brace."""
        end = self._end or "}"
        place = self._buffer.find(end, self._searched)
        self._searched = max(0, len(self._buffer) - len(end) + 1)
        return place >= 0 and self._turn_to(_State.TEXT, self._buffer[place + len(end) :])


def _loaded(text: str) -> Any:
    """Return the value of JSON; None if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(call: Any) -> str | None:
    """Return the arguments of a call as JSON; None for another value."""
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return json.dumps(arguments) if isinstance(arguments, dict) else None
