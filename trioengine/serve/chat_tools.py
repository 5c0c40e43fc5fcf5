"""The tools of a chat completion: how the model gets them, how its calls are forced, and calls in the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import load_object
from trioengine.serve.reading import read
from trioengine.serve.requests import ChatCompletionRequest, Function, FunctionTool, ToolCall, ToolChoice
from trioengine.text.tool_calls import ToolForm

_INSTRUCTIONS = """You may call functions. These are their JSON schemas, one in a line:
{tools}
To call one, answer with its name and arguments as JSON, in this form:
{example}"""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    functions: Sequence[Function]
    form: ToolForm
    grammar: Grammar | None  # of a call that is forced

    @property
    def variable(self) -> list[dict[str, Any]]:
        """The tools as chat templates get them."""
        return [{"type": "function", "function": _shown(function)} for function in self.functions]

    @property
    def instructions(self) -> str:
        """The tools as a text, for a model whose chat template does not print them."""
        example = self.form.text_of("function", {"argument": "value"})
        return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, self.variable)), example=example)


def parse_tools(given: ChatCompletionRequest, form: ToolForm) -> tuple[Tools | None, tuple[str, ...]]:
    """Return the tools of a request, and the types of tools that are passed over. Raises ClientError."""
    functions: list[Function] = []
    skipped: list[str] = []
    for index, tool in enumerate(given.tools or ()):
        kind = tool.get("type", "function")
        if kind == "function":
            functions.append(read(tool, FunctionTool, f"tools[{index}]").function)
        else:
            skipped.append(f"tools.{kind}"[:64])
    choice = given.tool_choice
    if not functions or choice == "none":
        if choice == "required" or isinstance(choice, ToolChoice):
            raise ClientError("invalid_value", "tool_choice needs tools that are functions", param="tool_choice")
        return None, tuple(skipped)
    is_single = given.parallel_tool_calls is False or isinstance(choice, ToolChoice)
    grammar = None if choice in (None, "auto") else _forced(functions, choice, form, is_single=is_single)
    return Tools(functions, form, grammar), tuple(skipped)


def _forced(functions: Sequence[Function], choice: object, form: ToolForm, *, is_single: bool) -> Grammar:
    chosen = functions
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        chosen = [function for function in functions if function.name == name]
        if not chosen:
            param = "tool_choice.function.name"
            raise ClientError("invalid_value", f"{param} must name one of the tools, got {name[:64]!r}", param=param)
    try:
        return form.grammar([msgspec.to_builtins(function) for function in chosen], is_single=is_single)
    except RequestRejected as exc:
        raise ClientError(exc.code, f"tools: {exc.message}", param="tools") from None


def _shown(function: Function) -> dict[str, Any]:
    shown = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in shown.items() if value is not None}


# ---- histories -----------------------------------------------------------------------------------------------------


def template_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message as chat templates get them: with arguments as an object."""
    return [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def calls_as_text(calls: Sequence[ToolCall], form: ToolForm) -> str:
    """Return the calls of an assistant's message as the model has written them."""
    return "\n".join([form.text_of(call.function.name, _arguments(call.function.arguments)) for call in calls])


def _arguments(text: str) -> Any:
    """Return the object in the arguments of a call; the text itself if it is not the JSON of one."""
    try:
        return load_object(text, "arguments")
    except ClientError:
        return text


def with_instructions(messages: Sequence[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """Add instructions to the system message at the beginning, or as one."""
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *messages]
