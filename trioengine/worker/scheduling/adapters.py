"""Which adapters the runner holds: the adapters of all sessions, and the latest of the others."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.messages import NO_ADAPTER, Adapter

MAX_IDLE = 8  # adapters that no session has


class AdapterRunner(Protocol):
    """The adapters of a model."""

    def load_adapter(self, number: int, path: str) -> None:
        """Load an adapter for the sequences that have its number. Raises ModelError if it cannot be used."""
        ...

    def drop_adapter(self, number: int) -> None:
        """Drop the adapter of this number, which is loaded."""
        ...


class Adapters:
    """Loads adapters when they are used first, and drops the ones that are unused for the longest time.

    Each load has a number of its own: the files may have changed since the one before.
    """

    def __init__(self, runner: AdapterRunner) -> None:
        self._runner = runner
        self._sessions: Counter[int] = Counter()  # that have the adapter, by its id
        self._loaded: dict[int, int] = {}  # the number of each, by its id; the one to be dropped first comes first
        self._num_loads = 0

    def hold(self, adapter: Adapter) -> None:
        """Count a session that has it."""
        self._sessions[adapter.id] += 1

    def release(self, adapter: Adapter) -> None:
        """The opposite of `hold`."""
        self._sessions[adapter.id] -= 1
        if self._sessions[adapter.id] == 0:
            del self._sessions[adapter.id]
            self._drop_idle(MAX_IDLE)

    def use(self, adapter: Adapter) -> int:
        """Load it unless it is loaded; returns its number. Raises ModelError if it cannot be used."""
        number = self._loaded.pop(adapter.id, NO_ADAPTER)
        if number == NO_ADAPTER:
            self._num_loads += 1
            number = self._num_loads
            self._load(number, adapter.path)
        self._loaded[adapter.id] = number
        return number

    def _load(self, number: int, path: str) -> None:
        """If it fails, as for a lack of memory, drop those that no session has, and try again."""
        try:
            self._runner.load_adapter(number, path)
        except ModelError:
            self._drop_idle(0)
            self._runner.load_adapter(number, path)

    def drop_all(self) -> None:
        """Drop all adapters, while no session exists."""
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
            self._runner.drop_adapter(self._loaded.pop(adapter))
