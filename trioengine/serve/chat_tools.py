"""The tools of a chat: how the model gets them, how its calls are forced, and calls in the history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import load_object
from trioengine.serve.reading import read
from trioengine.serve.requests import (
    ChatCompletionRequest,
    ChosenFunction,
    Function,
    FunctionTool,
    ToolCall,
    ToolChoice,
)
from trioengine.text.tool_calls import ToolForm

T = TypeVar("T", bound=msgspec.Struct)
Choice: TypeAlias = Literal["none", "auto", "required"] | ChosenFunction | None
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
    read_tools, skipped = known_tools(given.tools or (), FunctionTool, "tools")
    functions = [tool.function for tool in read_tools]
    choice = given.tool_choice.function if isinstance(given.tool_choice, ToolChoice) else given.tool_choice
    check_choice(functions, choice, CHAT_PATHS)
    return tools_of(functions, choice, form, is_single=given.parallel_tool_calls is False), skipped


def known_tools(given: Iterable[Mapping[str, Any]], type_: type[T], where: str) -> tuple[list[T], tuple[str, ...]]:
    """Return the functions among the tools, and the types of tools that are passed over. Raises ClientError."""
    functions: list[T] = []
    skipped: list[str] = []
    for index, tool in enumerate(given):
        kind = tool.get("type", "function")
        if kind == "function":
            functions.append(read(tool, type_, f"{where}[{index}]"))
        else:
            skipped.append(f"tools.{kind}"[:64])
    return functions, tuple(skipped)


class ChoicePaths(NamedTuple):
    """The paths of a choice of tools, and of the function's name in it, which errors name."""

    choice: str
    name: str


CHAT_PATHS = ChoicePaths("tool_choice", "tool_choice.function.name")


def check_choice(functions: Sequence[Function], choice: Choice, paths: ChoicePaths) -> None:
    """Raise ClientError if the choice forces a call, and there is no such function."""
    if not functions and (choice == "required" or isinstance(choice, ChosenFunction)):
        raise ClientError("invalid_value", f"{paths.choice} needs tools that are functions", param=paths.choice)
    if isinstance(choice, ChosenFunction) and not _chosen(functions, choice):
        message = f"{paths.name} must name one of the tools, got {choice.name[:64]!r}"
        raise ClientError("invalid_value", message, param=paths.name)


def tools_of(functions: Sequence[Function], choice: Choice, form: ToolForm, *, is_single: bool) -> Tools | None:
    """Return the tools for the model; None if there are none, or the choice, which was checked, hides them.

    Raises ClientError for parameters from which no grammar can be made.
    """
    if not functions or choice == "none":
        return None
    if choice in (None, "auto"):
        return Tools(functions, form, None)
    is_single = is_single or isinstance(choice, ChosenFunction)
    chosen = [msgspec.to_builtins(function) for function in _chosen(functions, choice)]
    try:
        return Tools(functions, form, form.grammar(chosen, is_single=is_single))
    except RequestRejected as exc:
        raise ClientError(exc.code, f"tools: {exc.message}", param="tools") from None


def _chosen(functions: Sequence[Function], choice: Choice) -> Sequence[Function]:
    if not isinstance(choice, ChosenFunction):
        return functions
    return [function for function in functions if function.name == choice.name]


def _shown(function: Function) -> dict[str, Any]:
    shown = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in shown.items() if value is not None}


# ---- histories -----------------------------------------------------------------------------------------------------


def with_calls(
    message: dict[str, Any], calls: Sequence[ToolCall], form: ToolForm, *, takes_tools: bool
) -> dict[str, Any]:
    """Add calls to an assistant's message: for a template that prints tools as they are, or else as a text."""
    if not calls:
        return message
    if takes_tools:
        return {**message, "tool_calls": _template_calls(calls)}
    return {**message, "content": "\n".join(filter(None, (message["content"], _calls_as_text(calls, form))))}


def _template_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message as chat templates get them: with arguments as an object."""
    return [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def _calls_as_text(calls: Sequence[ToolCall], form: ToolForm) -> str:
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
