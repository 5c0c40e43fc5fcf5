"""The tools of fuzzed chats: requests that offer them, calls in answers by a parser of its own, and histories of calls.

The toy model writes a call only where a grammar demands it, for a choice that forces one or by a regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from trioengine.core.grammar import Grammar
from trioengine.core.types import ToolCall, ToolCallDelta
from trioengine.testing.fuzz.conversations import Turn
from trioengine.text.tool_calls import FORMS

_ALLOWED = (True, "}")  # a brace in a string is not the end of a call
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": _ALLOWED}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS: Mapping[str, dict[str, Any]] = {"f": {"name": "f", "parameters": _SCHEMA}, "g": {"name": "g"}}
CALL_ID = "c"  # of a call in a history


@dataclass(frozen=True)
class ToolUse:
    """The functions that a request offers, and its choice of them; the answer may follow a regular expression."""

    functions: str = "f"  # a name is a letter
    choice: str = "auto"  # or none, required, or the name of one
    is_parallel: bool = True
    pattern: str | None = None
    turns: tuple[Turn, ...] = ()  # of the history
    messages: tuple[Mapping[str, Any], ...] = ()  # the same, as clients send them

    @property
    def is_forced(self) -> bool:
        return self.choice not in ("auto", "none")

    @property
    def prompt(self) -> tuple[Turn, ...]:
        """The turns before the last message; the template prints the names of the tools as one."""
        return self.turns if self.choice == "none" else (("tools", self.functions), *self.turns)

    def fields(self) -> dict[str, Any]:
        """The fields of a chat completion."""
        named = {"type": "function", "function": {"name": self.choice}}
        given = {
            "tools": [{"type": "function", "function": FUNCTIONS[name]} for name in self.functions],
            "tool_choice": named if self.choice in FUNCTIONS else self.choice,
            "parallel_tool_calls": None if self.is_parallel else False,
            "structured_outputs": None if self.pattern is None else {"regex": self.pattern},
        }
        return {name: value for name, value in given.items() if value is not None}

    def realtime_fields(self) -> dict[str, Any]:
        """The fields of a response of Realtime."""
        fields = {name: value for name, value in self.fields().items() if name != "structured_outputs"}
        fields["tools"] = [{"type": "function", **FUNCTIONS[name]} for name in self.functions]
        if self.choice in FUNCTIONS:
            fields["tool_choice"] = {"type": "function", "name": self.choice}
        return fields

    def grammar(self, form: str) -> Grammar | None:
        """The grammar of its answer."""
        return _grammar(self, form) if self.is_forced or self.pattern is not None else None

    def check(self, calls: Sequence[Call]) -> None:
        """Check the calls of an answer that has come to its end, and was forced: they are valid by their schemas."""
        assert calls, "a call was forced, and there is none"
        assert len(calls) == 1 or (self.is_parallel and self.choice == "required"), f"one call is due, not {calls}"
        for name, arguments in calls:
            found = json.loads(arguments)
            assert name in self.functions and self.choice in ("required", name), f"{name} is called: {self}"
            is_valid = isinstance(found, dict) and (name == "g" or ([*found] == ["a"] and found["a"] in _ALLOWED))
            assert is_valid, f"the arguments of {name} are {arguments}"


@lru_cache(maxsize=64)
def _grammar(use: ToolUse, form: str) -> Grammar:
    if use.pattern is not None:
        return Grammar.regex(use.pattern)
    functions = [FUNCTIONS[name] for name in (use.choice if use.choice in FUNCTIONS else use.functions)]
    is_single = use.choice != "required" or not use.is_parallel
    return FORMS[form].grammar(functions, is_single=is_single)


_HEAD = '{"name": "g", "arguments": '
_CALLED = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}
_MESSAGES = (
    {"role": "assistant", "content": None, "tool_calls": [_CALLED]},
    {"role": "tool", "tool_call_id": CALL_ID, "content": "no"},
)
_TURNS: tuple[Turn, ...] = (("assistant", '[f {"a": true}]'), ("tool", "no"))
_PATTERNS = {
    "text and call": rf"[a-c]{{1,2}}<tool_call>{re.escape(_HEAD)}\{{\"a\": \"</\"\}}\}}</tool_call>",
    "call and text": rf"<tool_call>{re.escape(_HEAD)}\{{\}}\}}</tool_call>[a-c]{{1,6}}",
    "no call": r"<tool_call>(\{[a-c]{1,9}\}</tool_call>)?[a-c]{2}",
    "two calls": r'\{"name":"f","arguments":\{\}\}(; ?|\n)\{"name":"g","arguments":\{"a":[0-9]\}\}',
}
TOOL_USES: Mapping[str, ToolUse] = {
    "required": ToolUse(choice="required"),
    "required of two": ToolUse("fg", choice="required"),
    "single": ToolUse(choice="required", is_parallel=False),
    "named": ToolUse("fg", choice="g"),
    "none": ToolUse(choice="none"),
    "auto": ToolUse("fg"),
    "answered": ToolUse("g", turns=_TURNS, messages=_MESSAGES),
    "history alone": ToolUse("g", choice="none", turns=_TURNS, messages=_MESSAGES),
    **{name: ToolUse("g", pattern=pattern) for name, pattern in _PATTERNS.items()},
}

CALLING = ("required", "required", "named", "text and call", "call and text")


class Call(NamedTuple):
    """A call in an answer."""

    name: str
    arguments: str  # JSON; the beginning of it in an answer that was cut


class Parts(NamedTuple):
    """The text of an answer beside its calls, and these."""

    text: str
    calls: tuple[Call, ...]


_BEGIN = {"hermes": re.compile(r"<tool_call>\s*"), "json": re.compile(r"\A[;\s]*(?=\{)")}
_BEGIN["llama3"] = _BEGIN["json"]
_CALL_HEAD = re.compile(r'\{"name": ?"(\w)", ?"(?:arguments|parameters)": ?(?=\{)')
_TAG = "</tool_call>"
_CUT_TAG = "|".join(rf"{_TAG[:length]}\Z" for length in range(len(_TAG)))  # or none, at the end of the answer
_END = {"hermes": re.compile(rf"\A\}}\s*(?:{_TAG}|{_CUT_TAG})"), "json": re.compile(r"\A\}")}
_END["llama3"] = _END["json"]


def is_json(text: str) -> bool:
    """Whether it is JSON, and whole."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def items_of(answer: str, form: str) -> list[tuple[str, str]]:
    """The items of a response with this answer, by type, each with its text or its arguments; calls come first."""
    text, calls = parts_of(answer, form)
    items = [("function_call", call.arguments) for call in calls]
    return [*items, *([("message", text)] if text or not items else [])]


def parts_of(answer: str, form: str, *, is_aborted: bool = False) -> Parts:
    """Divide an answer into text and calls; all but calls is text, and the end of a call may be cut.

    The beginning of a call without arguments is text, unless the answer was aborted.
    """
    calls: list[Call] = []
    text, rest = "", answer
    while (begin := _BEGIN[form].search(rest)) is not None:
        head = _CALL_HEAD.match(rest, begin.end())
        if head is None and is_aborted and not (form == "hermes" and _TAG in rest[begin.end() :]):
            return Parts(text + rest[: begin.start()], tuple(calls))
        if head is None:
            text, rest = text + rest[: begin.end()], rest[begin.end() :]
            if form != "hermes":
                break
            continue
        text += rest[: begin.start()]
        try:
            _, end = json.JSONDecoder().raw_decode(rest, head.end())
        except ValueError:
            end = len(rest)
        calls.append(Call(head[1], rest[head.end() : end]))
        rest = rest[end:]
        closing = _END[form].match(rest)
        rest = rest[closing.end() :] if closing is not None else rest.removeprefix("}")
    return Parts(text + (rest if rest.strip() or not calls else ""), tuple(calls))


@dataclass(frozen=True)
class Offered:
    """The tools that a request to an engine offers, and the form in which its model writes calls."""

    use: ToolUse
    form: str

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer."""
        return self.use.grammar(self.form)

    @property
    def shown(self) -> tuple[Turn, ...]:
        """As the chat template prints them, before all messages."""
        return self.use.prompt

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`; a regular expression is a sampling parameter."""
        return {name: value for name, value in self.use.fields().items() if name != "structured_outputs"}

    def parts(self, answer: str, *, is_aborted: bool = False) -> Parts:
        """The text of an answer, and the calls in it that are whole."""
        if self.use.choice == "none":
            return Parts(answer, ())
        text, calls = parts_of(answer, self.form, is_aborted=is_aborted)
        return Parts(text, tuple(call for call in calls if is_json(call.arguments)))

    def check_complete(self, answer: str) -> None:
        """Check an answer that was not cut, and has a grammar."""
        if self.use.is_forced:
            self.use.check(self.parts(answer).calls)
        if self.use.pattern is not None:
            assert re.fullmatch(self.use.pattern, answer), f"{answer!r} has ended, and is not {self.use.pattern}"


def parts_of_answer(tools: Offered | None, answer: str, *, is_aborted: bool = False) -> Parts:
    """The text of an answer with tools or not, and the calls in it that are whole."""
    return Parts(answer, ()) if tools is None else tools.parts(answer, is_aborted=is_aborted)


def parts_in(text: str, calls: Iterable[ToolCall]) -> Parts:
    """The same of a completion with this text and these calls."""
    return Parts(text, tuple(Call(call.name, call.arguments) for call in calls))


def joined(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that came in these parts, as far as they are whole; each comes after the one before it."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(ToolCall(delta.id, delta.name, ""))
        assert delta.index == len(calls) - 1, f"{delta} comes after the calls {calls}"
        call = calls[-1]
        assert (delta.id, delta.name) == (call.id, call.name), f"{call} goes on as {delta}"
        calls[-1] = replace(call, arguments=call.arguments + delta.arguments)
    return tuple(call for call in calls if is_json(call.arguments))
