"""Slots for the states of sequences, in models whose layers carry more than keys and values from token to token.

A slot is *held* by a running sequence, or by a step that saves a state in it; *kept* with the state behind the last
token of a block of the prefix cache; or *free*. Slot 0 is apart: rows that only pad a step write to it. So
`num_free + num_kept + num_held + 1 == num_slots`, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trioengine.core.errors import InvariantError

PADDING_SLOT = 0


class StateCopy(NamedTuple):
    """The state in a slot, as it is before the step, goes to another; from the padding's slot: zeros."""

    source: int
    target: int


class StateSave(NamedTuple):
    """The state behind the sequence's first `num_tokens` tokens goes to a slot, beside the sequence's own."""

    slot: int
    num_tokens: int


class StateSlots:
    """Gives slots to sequences and takes them back; keeps states for the prefix cache until their slots are needed."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: 0 for a model without states, else at least 2."""
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, PADDING_SLOT, -1))
        self._kept: dict[int, int] = {}  # the slot of each block; the one to be given up first comes first

    def __bool__(self) -> bool:
        return self.num_slots > 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_held(self) -> int:
        return max(0, self.num_slots - 1) - len(self._free) - len(self._kept)

    def take(self) -> int | None:
        """A free slot, or the one whose kept state is unused for the longest time; None when all are held."""
        if self._free:
            return self._free.pop()
        if self._kept:
            return self._kept.pop(next(iter(self._kept)))
        return None

    def give_back(self, slot: int) -> None:
        """Make a held slot free."""
        self._free.append(slot)

    def keep(self, slot: int, block: int) -> None:
        """Keep the state of a held slot for a block; the slot becomes free where the block has a state already."""
        if block in self._kept:
            self.give_back(slot)
            self.touch(block)
        else:
            self._kept[block] = slot

    def find(self, block: int) -> int | None:
        """The slot with the state behind a block."""
        return self._kept.get(block)

    def touch(self, block: int) -> None:
        """Note that the state behind a block is used."""
        self._kept[block] = self._kept.pop(block)

    def forget(self, block: int) -> None:
        """Give up the state, if any, behind a block that loses its content."""
        slot = self._kept.pop(block, None)
        if slot is not None:
            self._free.append(slot)

    def forget_all(self) -> None:
        """Make all slots free. Raises InvariantError while one is held."""
        if self.num_held:
            raise InvariantError(f"{self.num_held} state slots are held, and are to be forgotten")
        self._kept.clear()
        self._free = list(range(self.num_slots - 1, PADDING_SLOT, -1))

    def check_integrity(self, held: Iterable[int], blocks: Iterable[int]) -> None:
        """Raise InvariantError unless the accounts agree with the held slots, and states are kept for `blocks` only."""
        taken = [*held]
        slots = [*self._free, *self._kept.values(), *taken]
        if sorted(slots) != list(range(1, self.num_slots)):
            raise InvariantError(
                f"of {self.num_slots} state slots {len(self._free)} are free, {len(self._kept)} kept for "
                f"{dict(self._kept)}, and {taken} held"
            )
        if not self._kept.keys() <= set(blocks):
            raise InvariantError("the state behind a block is kept, and the block holds no prefix")
