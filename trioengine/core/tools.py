"""Tools of a request: the functions that a model may call, as callers give them, and the calls in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from trioengine.core.checks import check_flag, check_json, check_unicode, rejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import ToolCall, ToolCallDelta
from trioengine.core.wording import brief

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]

MAX_TOOLS = 128
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}(?!\\n)$"
_MAX_DEPTH = 56  # of a schema, which stands within an event: servers take events up to a depth of 64
_NAME = re.compile(NAME_PATTERN)
_NAMES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members that are given."""
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in shown.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools of a request, which has one at least. With `is_forced` the whole answer is calls, by a grammar."""

    functions: tuple[ToolFunction, ...]
    is_forced: bool = False
    chosen: str | None = None  # the name of the only function that a forced call may have
    is_single: bool = False  # a forced answer has one call

    @property
    def allowed(self) -> tuple[ToolFunction, ...]:
        """The functions that a forced call may have."""
        return tuple(each for each in self.functions if self.chosen in (None, each.name))


class ChoicePaths(NamedTuple):
    """The paths of a choice of tools, and of the function's name in it, which errors name."""

    choice: str
    name: str


CHAT_PATHS = ChoicePaths("tool_choice", "tool_choice.function.name")
FLAT_PATHS = ChoicePaths("tool_choice", "tool_choice.name")


def asked_tools(tools: object, choice: object, parallel: object, params: SamplingParams) -> AskedTools | None:
    """Return the tools that the arguments of a call ask for; None if there are none, or the choice hides them.

    Tools and the choice have the shape of chat completions, or the flat one of Realtime. Raises RequestRejected, also
    for a choice that forces a call beside a grammar of the caller's.
    """
    asked = _asked(tools, choice, parallel)
    if asked is not None and asked.is_forced and params.grammar is not None:
        raise rejected("tool_choice", "that forces a call does not go with a grammar")
    return asked


def _asked(tools: object, choice: object, parallel: object) -> AskedTools | None:
    functions = () if tools is None else _functions(tools)
    is_single = not check_flag("parallel_tool_calls", parallel)
    if isinstance(choice, str) and choice in _NAMES:
        asked = AskedTools(functions, choice == "required", None, is_single)
        check_choice(asked, CHAT_PATHS)
        return asked if functions and choice != "none" else None
    chosen, paths = _chosen(choice)
    asked = AskedTools(functions, is_forced=True, chosen=chosen, is_single=True)
    check_choice(asked, paths)
    return asked


def check_choice(asked: AskedTools, paths: ChoicePaths) -> None:
    """Raise RequestRejected if a call is forced, but no function matches the choice."""
    if asked.is_forced and not asked.functions:
        raise rejected(paths.choice, "needs tools that are functions")
    if not asked.allowed and asked.functions:
        raise rejected(paths.name, f"must name one of the tools, got {brief(asked.chosen)}")


def _functions(tools: object) -> tuple[ToolFunction, ...]:
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence) or len(tools) > MAX_TOOLS:
        raise rejected("tools", f"must be a list of at most {MAX_TOOLS} functions, got {brief(tools)}")
    return tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def _function(tool: object, where: str) -> ToolFunction:
    given, place = _unwrapped(tool, where)
    name, description, parameters = given.get("name"), given.get("description"), given.get("parameters")
    if not isinstance(name, str) or not _NAME.match(name):
        rule = "must be a string of 1 to 64 letters, digits, '_', '.' and '-'"
        raise rejected(f"{place}.name", f"{rule}, got {brief(name)}")
    if not (description is None or isinstance(description, str)):
        raise rejected(f"{place}.description", f"must be a string, got {brief(description)}")
    if not (parameters is None or (isinstance(parameters, Mapping) and _is_json(parameters))):
        raise rejected(f"{place}.parameters", f"must be a JSON schema of an object, got {brief(parameters)}")
    check_json(description, f"{place}.description")
    check_json(parameters, f"{place}.parameters")
    return ToolFunction(name, description, parameters)


def _chosen(choice: object) -> tuple[str, ChoicePaths]:
    given, place = _unwrapped(choice, "tool_choice", f"must be one of {', '.join(_NAMES)}, or a function")
    name = given.get("name")
    if not isinstance(name, str):
        raise rejected(f"{place}.name", f"must name one of the tools, got {brief(name)}")
    return name, FLAT_PATHS if place == "tool_choice" else CHAT_PATHS


def _unwrapped(value: object, where: str, rule: str = "must be a function") -> tuple[Mapping[str, Any], str]:
    """Return a function, from either shape, and its path."""
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        raise rejected(where, f'{rule}, as in {{"type": "function", "function": {{…}}}}, got {brief(value)}')
    if "function" not in value:
        return value, where
    if not isinstance(value["function"], Mapping):
        raise rejected(f"{where}.function", f"must be an object, got {brief(value['function'])}")
    return value["function"], f"{where}.function"


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return not _is_deeper(value, _MAX_DEPTH)


def _is_deeper(value: object, depth: int) -> bool:
    """Whether arrays and objects are nested deeper than this."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple) and (depth == 0 or any(_is_deeper(each, depth - 1) for each in value))


# ---- calls ----------------------------------------------------------------------------------------------------------


class JsonObject:
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


@dataclass(slots=True)
class _Growing:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)  # of the arguments
    num_read: int = -1  # of the pieces; -1: nothing of the call

    @property
    def has_unread(self) -> bool:
        return self.num_read < len(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether all of its arguments have come."""
        arguments = JsonObject()
        arguments.take("".join(self.pieces))
        return arguments.is_complete

    def read(self, index: int) -> ToolCallDelta:
        first, self.num_read = max(self.num_read, 0), len(self.pieces)
        return ToolCallDelta(index, self.id, self.name, "".join(self.pieces[first:]))


class GrowingCalls:
    """The calls of an answer while it arrives: one after the other, each with its arguments in pieces."""

    def __init__(self) -> None:
        self._calls: list[_Growing] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, id: str, name: str) -> None:
        """Begin a call; the one before it has all of its arguments."""
        self._calls.append(_Growing(id, name))

    def grow(self, arguments: str) -> None:
        """Take more of the arguments of the latest call."""
        self._calls[-1].pieces.append(arguments)

    @property
    def has_unread(self) -> bool:
        return any(call.has_unread for call in self._calls)

    def read(self) -> tuple[ToolCallDelta, ...]:
        """Take the unread part."""
        return tuple(call.read(index) for index, call in enumerate(self._calls) if call.has_unread)

    @property
    def whole(self) -> tuple[ToolCall, ...]:
        """The calls that have all of their arguments."""
        return tuple(ToolCall(call.id, call.name, "".join(call.pieces)) for call in self._calls if call.is_whole)


def checked_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    """Return the `tool_calls` of a chat message, at this path. Raises RequestRejected."""
    if isinstance(calls, str | bytes) or not isinstance(calls, Sequence):
        raise rejected(where, f"must be a list of calls, got {brief(calls)}")
    return tuple(_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _call(call: object, where: str) -> ToolCall:
    id = call.get("id") if isinstance(call, Mapping) else None
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function if isinstance(function, Mapping) else {}
    name, arguments = given.get("name"), given.get("arguments")
    if isinstance(arguments, Mapping) and _is_json(arguments):
        arguments = json.dumps(arguments)
    for path, value in (("id", id), ("function.name", name), ("function.arguments", arguments)):
        if not isinstance(value, str):
            raise rejected(f"{where}.{path}", f"must be a string, got {brief(value)}")
        check_unicode(value, f"{where}.{path}")
    return ToolCall(str(id), str(name), str(arguments))


NO_ANSWER: Mapping[str, Any] = {"content": ""}


def answer_fields(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the fields of an assistant's message with this answer."""
    fields: dict[str, Any] = {"content": text}
    return {**fields, "tool_calls": [call.to_json() for call in calls]} if calls else fields
