"""The answer of a response as its items at the server: messages, whose texts are one here, and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.tools import GrowingCalls

_CALL = "function_call"


@dataclass(slots=True)
class _Item:
    is_call: bool
    num_characters: int = 0  # of the text of a message


class Answer:
    """Follows the server's events; `texts` and `calls` grow until the request has an outcome."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.calls = GrowingCalls()
        self._items: dict[str, _Item] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def item_ids(self) -> list[str]:
        """The ids of all items."""
        return list(self._items)

    @property
    def kept_ids(self) -> list[str]:
        """The ids of the items that a part of the answer has: messages and whole calls."""
        calls = [id for id, item in self._items.items() if item.is_call]
        cut = calls[len(self.calls.whole) :]
        return [id for id in self._items if id not in cut]

    def add_item(self, item: Mapping[str, Any], *, is_over: bool) -> None:
        """An item begins; `is_over`: the request has its outcome already."""
        is_call = item.get("type") == _CALL
        self._items[item["id"]] = _Item(is_call)
        if is_call and not is_over:
            self.calls.begin(item["call_id"], item["name"])

    def add_text(self, item_id: str, delta: str) -> None:
        """More of a message."""
        self._items[item_id].num_characters += len(delta)
        self.texts.append(delta)

    def add_arguments(self, delta: str) -> None:
        """More of the latest call."""
        self.calls.grow(delta)

    def longer_ids(self, items: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
        """Return the messages of which the server has more, with the number of characters here."""
        texts = {item["id"]: "".join(part["text"] for part in item.get("content", ())) for item in items}
        return [
            (id, item.num_characters)
            for id, item in self._items.items()
            if not item.is_call and len(texts.get(id, "")) > item.num_characters
        ]
