"""What the engine needs of a worker, in each of its states."""

from __future__ import annotations

from typing import NamedTuple

from trioengine.core.lifecycle import Power
from trioengine.core.tag import ALL_TAGS, Tag


class WorkerNeeds(NamedTuple):
    """At one moment."""

    is_wanted: bool  # one that was lost, or has retired, is replaced now
    asleep: frozenset[Tag]  # what of one that starts now is to sleep
    runs_requests: bool  # where there is one, what is suspended goes on

    @property
    def is_indispensable(self) -> bool:
        """Whether the engine is of no use without one: its deaths count."""
        return self.is_wanted and not self.asleep


def worker_needs(
    power: Power, asleep: frozenset[Tag], *, in_flight: int, is_finishing: bool, is_changing: bool
) -> WorkerNeeds:
    """In this state, while `asleep` sleeps.

    `is_finishing`: requests in flight may still finish before a sleep or an update; `is_changing`: a change that is
    made asleep, or the sleep that a worker retires for, waits for a worker.
    """
    match power:
        case Power.FALLING_ASLEEP if is_finishing:
            return WorkerNeeds(in_flight > 0, asleep, runs_requests=True)
        case Power.FALLING_ASLEEP:
            return WorkerNeeds(is_changing, ALL_TAGS, runs_requests=False)
        case Power.ASLEEP:
            return WorkerNeeds(is_changing, asleep, runs_requests=False)
        case Power.WAKING:
            return WorkerNeeds(True, asleep, runs_requests=False)
        case Power.UPDATING:
            return WorkerNeeds(True, asleep, runs_requests=is_finishing)
        case Power.DRAINING:
            return WorkerNeeds(in_flight > 0 and not asleep, asleep, runs_requests=not asleep)
        case Power.CLOSED:
            return WorkerNeeds(False, asleep, runs_requests=False)
    return WorkerNeeds(True, asleep, runs_requests=True)  # LOADING, AWAKE, RESTARTING: nothing sleeps
