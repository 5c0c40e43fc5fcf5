"""The turns of a chat. A turn is a user message and all that follows it, up to the next user message.

System and developer messages at the beginning belong to no turn; other messages before the first user message are a
turn of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

Message: TypeAlias = Mapping[str, Any]

_LEADING = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Turns:
    """The messages of a chat, and the indices at which their turns begin."""

    messages: tuple[Message, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Self:
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        first = next((index for index, role in enumerate(roles) if role not in _LEADING), len(roles))
        starts = [index for index, role in enumerate(roles) if index == first or (index > first and role == "user")]
        return cls(tuple(messages), tuple(starts))

    @property
    def most(self) -> int:
        """How many turns can be dropped: all but the newest."""
        return max(len(self.starts) - 1, 0)

    def dropped(self, count: int) -> range:
        """The indices of the messages of the oldest `count` turns."""
        return range(self.starts[0], self.starts[count]) if count else range(0)

    def without(self, count: int) -> tuple[Message, ...]:
        """The messages without the oldest `count` turns."""
        dropped = self.dropped(count)
        return self.messages[: dropped.start] + self.messages[dropped.stop :] if dropped else self.messages

    @property
    def newest(self) -> tuple[Message, ...]:
        """The messages that are never dropped."""
        return self.without(self.most)
