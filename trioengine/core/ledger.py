"""The engine's accounts: requests accepted, in flight and ended. They balance after every step.

    received = finished + aborted + failed + in_flight
    in_flight = preparing + waiting + running + suspended

Ended requests are counted by finish reason (finished: stop or length), aborted ones also by cause. A request that left
the line for a slot (aborted, cancelled, its session ended) is received and aborted in one entry. Refused requests are
counted separately as `rejected`, and so are sessions that were refused, cancelled or ended while they were entered. A
session holds a session slot from its opening until the worker has released it, a request a request slot until the
worker is done with it, even if its reader left before.
"""

from __future__ import annotations

from trioengine.core.errors import InvariantError
from trioengine.core.types import Cause, FinishReason, TableEnum


class RequestState(TableEnum):
    """The state of a request in flight."""

    PREPARING = "preparing"
    WAITING = "waiting"  # at the worker, without a token yet
    RUNNING = "running"
    SUSPENDED = "suspended"  # at no worker; resumed when one may run it


class Ledger:
    """Counters of one engine; every method is one entry."""

    def __init__(self) -> None:
        self.sessions = 0
        self.received = 0
        self.rejected = 0
        self.finish_reasons = dict.fromkeys(FinishReason, 0)
        self.abort_causes = dict.fromkeys(Cause, 0)
        self._states = dict.fromkeys(RequestState, 0)

    @property
    def finished(self) -> int:
        reasons = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
        return sum(self.finish_reasons[reason] for reason in reasons)

    @property
    def aborted(self) -> int:
        return self.finish_reasons[FinishReason.ABORT]

    @property
    def failed(self) -> int:
        return self.finish_reasons[FinishReason.ERROR]

    @property
    def preparing(self) -> int:
        return self._states[RequestState.PREPARING]

    @property
    def waiting(self) -> int:
        return self._states[RequestState.WAITING]

    @property
    def running(self) -> int:
        return self._states[RequestState.RUNNING]

    @property
    def suspended(self) -> int:
        return self._states[RequestState.SUSPENDED]

    @property
    def in_flight(self) -> int:
        return sum(self._states.values())

    def open_session(self) -> None:
        self.sessions += 1

    def free_session(self) -> None:
        self.sessions -= 1

    def reject(self) -> None:
        self.rejected += 1

    def receive(self) -> None:
        self.received += 1
        self._states[RequestState.PREPARING] += 1

    def leave_line(self, cause: Cause) -> None:
        """Book a request that was aborted while it waited for a slot."""
        self.received += 1
        self.finish_reasons[FinishReason.ABORT] += 1
        self.abort_causes[cause] += 1

    def move(self, before: RequestState, after: RequestState) -> None:
        self._states[before] -= 1
        self._states[after] += 1

    def settle(self, state: RequestState, finish_reason: FinishReason, cause: Cause | None = None) -> None:
        """Book the end of a request, which frees its slot; `cause` is set for an abort."""
        self._states[state] -= 1
        self.finish_reasons[finish_reason] += 1
        if cause is not None:
            self.abort_causes[cause] += 1

    def check(self) -> None:
        """Raise InvariantError unless the accounts balance."""
        settled = self.finished + self.aborted + self.failed
        if self.received != settled + self.in_flight:
            raise InvariantError(f"received {self.received} != settled {settled} + in flight {self.in_flight}")
        negative = {state.value: count for state, count in self._states.items() if count < 0}
        if negative or self.sessions < 0:
            raise InvariantError(f"counts below zero: {negative or {'sessions': self.sessions}}")
