"""How many bytes of its clients the server keeps: one budget for the process, and one for each key.

Counted are bodies of requests, from the first byte until the engine has the prompt, and of each WebSocket connection:
messages on their way and unhandled, its conversation and instructions, the input of its responses, and unsent events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioengine.serve.problem import RATE_LIMIT, SERVER_ERROR, OverBudget, Problem

RETRY_AFTER = 1.0  # seconds
ALWAYS_TAKEN = 1 << 10  # bytes of a WebSocket message that is handled also where there is no room: it may be a cancel


def size_of(text: str | bytes) -> int:
    """The bytes that a text takes in memory: of ASCII one a character, of another text four at most."""
    return len(text) if isinstance(text, bytes) or text.isascii() else 4 * len(text)


class ByteBudget:
    """The budgets of one server. What one Held has taken it gives back, at its end at the latest."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._of_keys: dict[bytes, int] = {}  # by the key's digest; none of them is 0

    @contextmanager
    def holding(self, key: bytes | None) -> Iterator[Held]:
        """Within, bytes are held for a client; without a key they count for the process alone."""
        held = Held(self, key)
        try:
            yield held
        finally:
            held.give_all_back()

    def check_room(self, key: bytes | None, size: int) -> None:
        """Raises OverBudget if so many more bytes are too many."""
        if key is not None and self._of_keys.get(key, 0) + size > self._max_bytes_per_key:
            limit = f"{self._max_bytes_per_key} bytes (--max-buffered-bytes-per-key)"
            message = f"the server buffers at most {limit} for the requests and connections of a key"
            raise OverBudget(429, Problem(RATE_LIMIT, "key_buffers_full", message, retry_after=RETRY_AFTER))
        if self.num_bytes + size > self._max_bytes:
            message = f"the server buffers at most {self._max_bytes} bytes (--max-buffered-bytes) for its clients"
            raise OverBudget(503, Problem(SERVER_ERROR, "buffers_full", message, retry_after=RETRY_AFTER))

    def add(self, key: bytes | None, size: int) -> None:
        """Count so many more bytes, or fewer if it is negative."""
        self.num_bytes += size
        if key is None or not size:
            return
        count = self._of_keys.pop(key, 0) + size
        if count:
            self._of_keys[key] = count


class Held:
    """The bytes that one request or connection holds."""

    __slots__ = ("_budget", "_key", "num_bytes")

    def __init__(self, budget: ByteBudget, key: bytes | None) -> None:
        self._budget = budget
        self._key = key
        self.num_bytes = 0

    def check_room(self, size: int) -> None:
        """Raises OverBudget if so many more bytes are too many."""
        self._budget.check_room(self._key, size)

    def take(self, size: int) -> None:
        """Reserve so many bytes, before they are kept. Raises OverBudget, and then takes none."""
        self.check_room(size)
        self.charge(size)

    def charge(self, size: int) -> None:
        """Count so many bytes that are kept in any case, as those of an answer; or fewer if it is negative."""
        self.num_bytes += size
        assert self.num_bytes >= 0, f"{-size} bytes are given back, {self.num_bytes + -size} were taken"
        self._budget.add(self._key, size)

    def give_back(self, size: int) -> None:
        """So many bytes are kept no longer."""
        self.charge(-size)

    def give_all_back(self) -> None:
        """Nothing is kept any more."""
        self.give_back(self.num_bytes)
