"""The tools of a chat over the network: read from requests, and calls in the history of a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from trioengine.core.tools import CHAT_PATHS, AskedTools, ChoicePaths, ToolFunction, check_choice
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
from trioengine.text.tools import Tools, tools_of, with_shown_calls

T = TypeVar("T", bound=msgspec.Struct)
Choice: TypeAlias = Literal["none", "auto", "required"] | ChosenFunction | None


def parse_tools(given: ChatCompletionRequest, form: ToolForm) -> tuple[Tools | None, tuple[str, ...]]:
    """Return the tools of a request, and the types of tools that are passed over.

    Raises ClientError or RequestRejected.
    """
    read_tools, skipped = known_tools(given.tools or (), FunctionTool, "tools")
    functions = [tool.function for tool in read_tools]
    choice = given.tool_choice.function if isinstance(given.tool_choice, ToolChoice) else given.tool_choice
    is_single = given.parallel_tool_calls is False
    return tools_for(functions, choice, form, is_single=is_single, paths=CHAT_PATHS), skipped


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


def tools_for(
    functions: Sequence[Function], choice: Choice, form: ToolForm, *, is_single: bool, paths: ChoicePaths
) -> Tools | None:
    """Return the tools for the model; None if there are none, or the choice hides them.

    Raises RequestRejected for parameters from which no grammar can be made, and as `asked_for`.
    """
    asked = asked_for(functions, choice, is_single=is_single, paths=paths)
    return None if asked is None else tools_of(asked, form)


def asked_for(
    functions: Sequence[Function], choice: Choice, *, is_single: bool, paths: ChoicePaths
) -> AskedTools | None:
    """Return the tools that a request asks for; None if there are none, or the choice hides them.

    Raises RequestRejected, with these paths, if the choice forces a call, but no function matches it.
    """
    made = tuple(ToolFunction(each.name, each.description, each.parameters) for each in functions)
    chosen = choice.name if isinstance(choice, ChosenFunction) else None
    asked = AskedTools(made, choice not in (None, "auto", "none"), chosen, is_single or chosen is not None)
    check_choice(asked, paths)
    return asked if made and choice != "none" else None


def with_calls(
    message: dict[str, Any], calls: Sequence[ToolCall], form: ToolForm, *, takes_tools: bool
) -> dict[str, Any]:
    """Add calls to an assistant's message: for a template that prints tools as they are, or else as a text."""
    if not calls:
        return message
    return {**with_shown_calls({**message, "tool_calls": msgspec.to_builtins(calls)}, form, takes_tools=takes_tools)}
