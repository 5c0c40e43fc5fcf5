"""The requests in flight, by the ids that their clients know: the server's, and those that a client has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trioengine.actors.generation import Generation


class InFlight:
    """Requests of one server; an id that clients choose may be that of several."""

    def __init__(self) -> None:
        self._generations: dict[str, list[Generation]] = {}  # none is empty

    def __len__(self) -> int:
        """How many ids are known."""
        return len(self._generations)

    @contextmanager
    def running(self, ids: Iterable[str], generation: Generation) -> Iterator[None]:
        """Within, the request is known by these ids, of which some may be the same."""
        names = tuple(dict.fromkeys(ids))
        for id in names:
            self._generations.setdefault(id, []).append(generation)
        try:
            yield
        finally:
            for id in names:
                self._generations[id].remove(generation)
                if not self._generations[id]:
                    del self._generations[id]

    def abort(self, id: str) -> int:
        """Abort the requests of this id, and return how many this call aborts."""
        return sum(generation.abort() for generation in self._generations.get(id, ()))
