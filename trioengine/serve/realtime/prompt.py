"""The prompt of a response: items as chat messages, with instructions and tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioengine.serve.chat_request import ServedModel
from trioengine.serve.chat_tools import with_calls
from trioengine.serve.limits import size_of, size_of_json
from trioengine.serve.realtime.item import ITEM_SIZE, FunctionCallItem, Item, Role, size_of_parts
from trioengine.serve.requests import ToolCall
from trioengine.text.messages import Turns
from trioengine.text.tools import Tools, with_instructions


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages, the variables of the chat template, and for each message the ids of the items in it."""

    messages: list[dict[str, Any]]
    item_ids: list[tuple[str, ...]]
    variables: Mapping[str, Any]

    @property
    def size(self) -> int:
        """The bytes of memory."""
        return sum(map(_size_of_message, self.messages)) + (size_of_json(self.variables) if self.variables else 0)

    def dropped_item_ids(self, count: int) -> list[str]:
        """Return the ids of the items in the oldest `count` turns."""
        return [id for index in Turns.of(self.messages).dropped(count) for id in self.item_ids[index]]


@dataclass(slots=True)
class _Entry:
    message: dict[str, Any]
    item_ids: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


def prompt_of(items: Iterable[Item], instructions: str, tools: Tools | None, model: ServedModel) -> ChatPrompt:
    """Return instructions, tools and items, without empty ones, as a prompt for this model."""
    entries = [_Entry({"role": "system", "content": instructions})] if instructions else []
    for item in items:
        if not item.is_empty:
            _add(entries, item)
    messages = [
        with_calls(entry.message, entry.calls, model.tool_form, takes_tools=model.takes_tools) for entry in entries
    ]
    item_ids = [tuple(entry.item_ids) for entry in entries]
    if tools is None or not messages:
        return ChatPrompt(messages, item_ids, {})
    if model.takes_tools:
        return ChatPrompt(messages, item_ids, {"tools": tools.variable})
    instructed = [{**message} for message in with_instructions(messages, tools.instructions)]
    return ChatPrompt(instructed, [()] * (len(instructed) - len(messages)) + item_ids, {})


def _add(entries: list[_Entry], item: Item) -> None:
    """Add an item; calls belong to the assistant's message before them."""
    is_call = isinstance(item, FunctionCallItem)
    if not (is_call and entries and entries[-1].message["role"] == Role.ASSISTANT.value):
        entries.append(_Entry(item.message))
    entries[-1].item_ids.append(item.id)
    if isinstance(item, FunctionCallItem):
        entries[-1].calls.append(item.call)


def num_turns(items: Iterable[Item]) -> int:
    """Return the number of turns in these items."""
    return len(Turns.of([{"role": item.role.value} for item in items if not item.is_empty]).starts)


def _size_of_message(message: Mapping[str, Any]) -> int:
    content: str | Sequence[Mapping[str, Any]] = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", part) for part in content]
    size = ITEM_SIZE + size_of_parts(parts) + size_of(message.get("tool_call_id", ""))
    return size + (size_of_json(calls) if (calls := message.get("tool_calls")) else 0)
