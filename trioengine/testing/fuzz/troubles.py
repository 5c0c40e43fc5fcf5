"""The harm that a program does to the engine, by which errors and aborts are excused."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from trioengine.core.types import Cause
from trioengine.testing.toy_model import TOY_PATH


@dataclass
class Troubles:
    """The harm that was done until now."""

    workers: bool = False  # one was harmed, or could not be started
    closing: bool = False  # nothing more is admitted
    causes: set[Cause] = field(default_factory=set)  # by which others than its reader may have aborted a request
    requests: set[int] = field(default_factory=set)  # that the worker was told to fail
    operators: bool = False  # one has ended a request
    wakes: bool = False  # a worker was told to fail one
    sleeps_abort: bool = False  # a sleep or an update may abort what has begun
    poisoned: Mapping[int, int] = field(default_factory=dict)  # requests, and how many tokens they get
    dropped: AbstractSet[bytes] = frozenset()  # images that made room for others
    deaths: int = 0  # of workers
    retired: int = 0  # of these, as it was asked to sleep deeper
    paths: list[str] = field(default_factory=lambda: ["", TOY_PATH])  # of the weights, by their version

    def excuse(self, code: str) -> bool:
        """Whether a client of a server may get this code."""
        match code:
            case "overloaded":
                return True
            case "aborted":
                return self.operators
            case "asleep":
                return Cause.SLEEP in self.causes
            case "worker_lost":
                return self.workers
            case "shutting_down" | "shutdown":
                return self.closing or self.workers  # the engine may have given up
            case _:
                return code in {cause.value for cause in self.causes}
