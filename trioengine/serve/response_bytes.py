"""The bytes that one request with choices keeps: its body, and then its response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioengine.core.types import Chunk
from trioengine.serve.limits import Held

FREE = 64 << 10  # bytes of a response that do not count
_POSITION, _ENTRY = 120, 100  # bytes of a token's log-probabilities, and of each of them
ID_SIZE = 36  # bytes of a token id in a tuple


class ResponseBytes:
    """Counts them in the byte budget: a response's beyond the first ones, and until the request is over."""

    __slots__ = ("_body_size", "_held", "_size")

    def __init__(self, held: Held | None) -> None:
        """`held` has the bytes of the body; without it nothing is counted."""
        self._held = held
        self._body_size = 0 if held is None else held.num_bytes
        self._size = 0

    def drop_body(self) -> None:
        """Give the body's bytes back."""
        if self._held is not None:
            self._held.give_back(self._body_size)
            self._body_size = 0

    def add(self, size: int) -> None:
        """Count more bytes of the response, or fewer if `size` is negative."""
        before, self._size = self._size, self._size + size
        if self._held is not None and max(before, self._size) > FREE:
            self._held.charge(max(0, self._size - FREE) - max(0, before - FREE))

    @contextmanager
    def keeping(self, size: int) -> Iterator[None]:
        """Count bytes for the block."""
        self.add(size)
        try:
            yield
        finally:
            self.add(-size)


def size_of_logprobs(chunk: Chunk) -> int:
    """Return the bytes that the log-probabilities of a chunk take in memory, about."""
    positions = (*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ()))
    return sum(_POSITION + _ENTRY * len(position or ()) for position in positions)
