"""Which adapters the runner holds: the adapters of all sessions, and the latest of the others."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from trioengine.core.errors import InvariantError
from trioengine.core.messages import Adapter

MAX_IDLE = 8  # adapters that no session has


class AdapterRunner(Protocol):
    """The adapters of a model."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for steps of sequences with its id. Raises ModelError if it cannot be used."""
        ...

    def drop_adapter(self, adapter: int) -> None:
        """Drop the adapter of this id, which is loaded."""
        ...


class Adapters:
    """Loads adapters when they are used first, and drops the ones that are unused for the longest time."""

    def __init__(self, runner: AdapterRunner) -> None:
        self._runner = runner
        self._sessions: Counter[int] = Counter()  # that have the adapter, by its id
        self._loaded: dict[int, None] = {}  # an ordered set: the one to be dropped first comes first

    def hold(self, adapter: Adapter) -> None:
        """Count a session that has it."""
        self._sessions[adapter.id] += 1

    def release(self, adapter: Adapter) -> None:
        """The opposite of `hold`."""
        self._sessions[adapter.id] -= 1
        if self._sessions[adapter.id] == 0:
            del self._sessions[adapter.id]
            self._drop_idle(MAX_IDLE)

    def use(self, adapter: Adapter) -> None:
        """Load it unless it is loaded. Raises ModelError if it cannot be used."""
        if adapter.id not in self._loaded:
            self._runner.load_adapter(adapter)
        self._loaded.pop(adapter.id, None)
        self._loaded[adapter.id] = None

    def drop_all(self) -> None:
        """Drop them all, while there is no session."""
        self._drop_idle(0)

    def check_integrity(self, held: Counter[int]) -> None:
        """Raise InvariantError unless these are the numbers of sessions, by their adapter."""
        if held != self._sessions:
            raise InvariantError(f"sessions have the adapters {held}, and {self._sessions} are counted")
        if sum(adapter not in held for adapter in self._loaded) > MAX_IDLE:
            raise InvariantError(f"more than {MAX_IDLE} adapters are kept for no session")

    def _drop_idle(self, most: int) -> None:
        idle = [adapter for adapter in self._loaded if adapter not in self._sessions]
        for adapter in idle[: max(0, len(idle) - most)]:
            del self._loaded[adapter]
            self._runner.drop_adapter(adapter)
