"""The requests in flight, by the ids that their clients know: of chat completions and of responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioengine.actors.generation import Generation


class InFlight:
    """Those of one server."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._generations)

    @contextmanager
    def running(self, id: str, generation: Generation) -> Iterator[None]:
        """Known by this id in the block."""
        self._generations[id] = generation
        try:
            yield
        finally:
            del self._generations[id]

    def abort(self, id: str) -> bool:
        """Ask for the end of a request; False if there is none of this id, or its outcome is decided."""
        generation = self._generations.get(id)
        if generation is None or generation.outcome is not None:
            return False
        generation.abort()
        return True
