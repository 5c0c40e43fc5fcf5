"""The faults that a program has injected, as periods: they excuse an error in the lives that they overlap."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from trioengine.core.types import Cause
from trioengine.testing.toy_weights import TOY_PATH


class Harm(enum.Enum):
    """The kinds of faults, by their effects."""

    WORKERS = "workers"  # one was harmed, or cannot be started
    CLOSING = "closing"  # nothing more is admitted
    WAKES = "wakes"  # a worker is to fail one
    OPERATORS = "operators"  # one has ended a request
    SAMPLING = "sampling"  # the worker is to fail a request
    SLEEPS_ABORT = "sleeps abort"  # a sleep or an update may abort requests that have begun
    SLEEP = "sleep"
    SLEEP_EMPTIES_LINES = "sleep empties lines"  # and so aborts requests that wait for a slot
    SHUTDOWN = "shutdown"
    ABORT_ALL = "abort all"
    DROPS = "drops"  # of a client's messages, for lack of room
    DISPLACES = "displaces"  # a connection makes room for another, before it has asked for anything


_CAUSES = {Harm.SLEEP: Cause.SLEEP, Harm.SHUTDOWN: Cause.SHUTDOWN, Harm.ABORT_ALL: Cause.ABORT_ALL}
_CODES = {
    "aborted": (Harm.OPERATORS,),
    "asleep": (Harm.SLEEP,),
    "sampling_failed": (Harm.SAMPLING,),
    "worker_lost": (Harm.WORKERS,),
    "shutting_down": (Harm.CLOSING, Harm.WORKERS),  # the engine may have given up
    "shutdown": (Harm.CLOSING, Harm.WORKERS),
    **{cause.value: (harm,) for harm, cause in _CAUSES.items() if cause is not Cause.SHUTDOWN},
}


class Life:
    """The span of a task, request or change, in moments: until now, unless it has ended."""

    def __init__(self, faults: InjectedFaults) -> None:
        self._faults = faults
        self.began = faults.moment()
        self.ended = math.inf

    def end(self) -> None:
        """It is over."""
        self.ended = self._faults.moment()


@dataclass
class Period:
    """The span in which a fault has effects, in moments."""

    began: int
    ended: float = math.inf


@dataclass
class InjectedFaults:
    """The harm that was done until now. Moments are numbered in the order in which anything here happens."""

    requests: set[int] = field(default_factory=set)  # that the worker is to fail
    poisoned: Mapping[int, int] = field(default_factory=dict)  # requests, and how many tokens they get
    dropped: AbstractSet[bytes] = frozenset()  # images that made room for others
    deaths: int = 0  # of workers
    retired: int = 0  # of these, as it was asked to sleep deeper
    paths: list[str] = field(default_factory=lambda: ["", TOY_PATH])  # of the weights, by their version
    _periods: dict[Harm, list[Period]] = field(default_factory=lambda: {harm: [] for harm in Harm})
    _moments: itertools.count[int] = field(default_factory=itertools.count)

    def moment(self) -> int:
        """The number of this moment."""
        return next(self._moments)

    def begin(self, harm: Harm) -> None:
        """From now on this fault has effects."""
        if not self.lasts(harm):
            self._periods[harm].append(Period(self.moment()))

    def end(self, harm: Harm) -> None:
        """From now on it has none: all has come to rest."""
        if self.lasts(harm):
            self._periods[harm][-1].ended = self.moment()

    def strike(self, harm: Harm) -> None:
        """A fault has its effect at once."""
        if not self.lasts(harm):
            now = self.moment()
            self._periods[harm].append(Period(now, now))

    def lasts(self, harm: Harm) -> bool:
        """Whether it may have effects now."""
        periods = self._periods[harm]
        return bool(periods) and periods[-1].ended == math.inf

    def hit(self, life: Life, *harms: Harm) -> bool:
        """Whether one of these faults may have had effects in this life."""
        periods = itertools.chain.from_iterable(self._periods[harm] for harm in harms)
        return any(period.began <= life.ended and period.ended >= life.began for period in periods)

    def causes(self, life: Life) -> set[Cause]:
        """The causes by which others than its reader may have aborted a request with this life."""
        return {cause for harm, cause in _CAUSES.items() if self.hit(life, harm)}

    def excuse(self, code: str, life: Life) -> bool:
        """Whether a client of a server may get this code."""
        return code == "overloaded" or self.hit(life, *_CODES.get(code, ()))

    @property
    def closing(self) -> bool:
        """Whether nothing more is admitted."""
        return self.lasts(Harm.CLOSING)
