"""Clients that went away with something in flight: how many there were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioengine.serve.streaming import Disconnected


class Departures:
    """One count for a server, of HTTP and WebSocket clients."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one where the body raises Disconnected, in a group or by itself."""
        try:
            yield
        except Disconnected:
            self.add()
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(Disconnected) is not None:
                self.add()
            raise
