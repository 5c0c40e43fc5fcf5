"""Tools in prompts: how a model gets them, how its calls are forced, and calls in the history.

A chat template prints tools and calls, or else they are texts, in the form in which the model writes calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trioengine.core.checks import check_json
from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.tools import AskedTools, ToolFunction
from trioengine.text.messages import Message, text_part
from trioengine.text.tool_calls import ToolForm

_INSTRUCTIONS = """You may call functions. These are their JSON schemas, one in a line:
{tools}
To call one, answer with its name and arguments as JSON, in this form:
{example}"""
_ORDER = ("type", "id", "function", "name", "arguments")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request for one model."""

    functions: Sequence[ToolFunction]
    form: ToolForm
    grammar: Grammar | None  # of a call that is forced

    @property
    def variable(self) -> list[dict[str, Any]]:
        """The tools as chat templates get them."""
        return [{"type": "function", "function": function.to_json()} for function in self.functions]

    @property
    def instructions(self) -> str:
        """The tools as a text, for a model whose chat template does not print them."""
        example = self.form.text_of("function", {"argument": "value"})
        return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, self.variable)), example=example)


def tools_of(asked: AskedTools, form: ToolForm) -> Tools:
    """Return the tools for a model that writes calls in this form.

    Raises RequestRejected(code="invalid_grammar") for parameters from which no grammar can be made.
    """
    if not asked.is_forced:
        return Tools(asked.functions, form, None)
    allowed = [function.to_json() for function in asked.allowed]
    try:
        return Tools(asked.functions, form, form.grammar(allowed, is_single=asked.is_single))
    except RequestRejected as exc:
        raise RequestRejected(exc.code, f"tools: {exc.message}", param="tools") from None


def with_instructions(messages: Sequence[Message], instructions: str) -> tuple[Message, ...]:
    """Add instructions to the system message at the beginning, or as one."""
    first, *rest = messages
    if first["role"] != "system":
        return ({"role": "system", "content": instructions}, *messages)
    content = first["content"]
    added: Any = f"{content}\n\n{instructions}" if isinstance(content, str) else [*content, text_part(instructions)]
    return ({**first, "content": added}, *rest)


def with_shown_calls(message: Message, form: ToolForm, *, takes_tools: bool) -> Message:
    """Return an assistant's message as the template gets it: calls with objects as arguments, or as a text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    shown = list(map(_with_object, calls))
    content = message.get("content") or ""
    if takes_tools or not isinstance(content, Sequence):
        return {**message, "tool_calls": shown}
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = list(map(form.text_of_call, shown))
    if isinstance(content, str):
        return {**fields, "content": "\n".join(filter(None, (content, *texts)))}
    return {**fields, "content": [*content, *([text_part("\n".join(texts))] if texts else [])]}


def _with_object(call: Any) -> Any:
    """Return an entry of `tool_calls` with its arguments as an object, if they are the JSON of one.

    Its members have one order, whatever the caller's: templates may print it as a whole.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function or "arguments" not in function:
        return call
    arguments = function["arguments"]
    shown = {**function, "arguments": _object_in(arguments) if isinstance(arguments, str) else arguments}
    return _in_order({"type": "function", **call, "function": _in_order(shown)})


def _in_order(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: members[name] for name in sorted(members, key=_rank)}


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _object_in(text: str) -> Any:
    """Return the object in a JSON text; the text itself if it is not the JSON of one."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        check_json(value, "arguments")
    except (ValueError, RecursionError, RequestRejected):
        return text
    return value if isinstance(value, dict) else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
