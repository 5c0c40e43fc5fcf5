"""Mutants of tool calls: in answers, in the history, and after a worker's loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutant import Mutant, replaced

from trioengine.actors.request import Request
from trioengine.client import conversation as conversations
from trioengine.core.messages import AddMessage
from trioengine.core.sampling_params import replace_valid
from trioengine.core.tools import GrowingCalls
from trioengine.core.types import ToolCall
from trioengine.text.tool_calls import Part, ToolCallParser


def _give_the_beginning(finish: Any) -> Any:
    def mutant(self: ToolCallParser, *, is_aborted: bool = False) -> list[Part]:
        parts: list[Part] = finish(self)
        return parts

    return mutant


def _give_another_id(whole: Any) -> Any:
    def mutant(self: GrowingCalls) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(f"{call.id}-{len(self)}", call.name, call.arguments) for call in whole.fget(self))

    return property(mutant)


def _give_cut_calls(whole: Any) -> Any:
    def mutant(self: GrowingCalls) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(call.id, call.name, "".join(call.pieces)) for call in self._calls)

    return property(mutant)


def _drop_forced_grammar(message: Any) -> Any:
    def mutant(self: Request, *args: Any) -> AddMessage:
        made: AddMessage = message(self, *args)
        is_dropped = made.num_output > 0 and self.params.grammar is None
        return replace(made, params=replace_valid(made.params, grammar=None)) if is_dropped else made

    return mutant


def _grow_the_first(grow: Any) -> Any:
    def mutant(self: GrowingCalls, arguments: str) -> None:
        self._calls[0].pieces.append(arguments)

    return mutant


def _name_the_item(items_of: Any) -> Any:
    def mutant(message: Any, mint: Any) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = items_of(message, mint)
        return [item | {"call_id": item["id"]} if item["type"] == "function_call_output" else item for item in items]

    return mutant


TOOL_MUTANTS = (
    Mutant(
        "F90",
        "the beginning of a call that was aborted is text",
        replaced(ToolCallParser, "finish", _give_the_beginning),
        shows="the text of an abort is",
    ),
    Mutant(
        "F90b",
        "a call that was cut is kept in the history",
        replaced(GrowingCalls, "whole", _give_cut_calls),
        shows="the chunks give|the text of an abort is|the model's is",
    ),
    Mutant(
        "F91",
        "the id of a call changes between its parts and the completion",
        replaced(GrowingCalls, "whole", _give_another_id),
        shows="the chunks give",
    ),
    Mutant(
        "F92",
        "a call that is forced goes on without its grammar after the loss of a worker",
        replaced(Request, "message", _drop_forced_grammar),
        shows=r"the model's|of none of the weights|by its grammar after \d+ tokens, and goes on",
        machine="PowerMachine",
    ),
    Mutant(
        "F93",
        "the arguments of a call go to another call of the same answer",
        replaced(GrowingCalls, "grow", _grow_the_first),
        shows="comes after the calls|the model's is|the chunks give",
    ),
    Mutant(
        "F94",
        "the result of a call is sent under the id of its own item",
        replaced(conversations, "items_of", _name_the_item),
        shows="the client's history is",
        machine="ClientMachine",
    ),
)
