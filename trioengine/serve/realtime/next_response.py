"""A response.create that came while a cancelled response had not ended: it is handled when that has."""

from __future__ import annotations

from trioengine.serve.limits import Held, size_of
from trioengine.serve.realtime.events import Received
from trioengine.serve.realtime.item import Item
from trioengine.serve.realtime.settings import NO_TOOLS


class NextResponse:
    """The remembered event. Until `release`, `held` accounts for its bytes, and the images of its input are kept.

    Raises OverBudget if it exceeds the budget.
    """

    def __init__(self, received: Received, held: Held) -> None:
        self.received = received
        self.is_cancelled = False  # by its client, before it began
        self._held = held
        self._items = [entry for entry in received.items if isinstance(entry, Item)]
        instructions = received.changes.get("instructions") or ""
        tools = received.changes.get("tools") or NO_TOOLS
        self._num_charged = sum(item.size for item in self._items) + size_of(instructions) + tools.size
        held.check_room(self._num_charged)
        held.charge(self._num_charged)
        for item in self._items:
            item.keep()

    def give_back(self) -> None:
        """Give its bytes back, before they are counted as the bytes of a response."""
        self._held.give_back(self._num_charged)
        self._num_charged = 0

    def release(self) -> None:
        """Give its bytes back, and release its images."""
        self.give_back()
        for item in self._items:
            item.release()
