"""Who is let in and who is turned away, watched at the gate and in its lines, whoever asks.

Each method is a `mutate` for `Machine._watch`; what is seen wrong is added to the crashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import trio

from trioengine.actors.gate import Gate
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.errors import EngineOverloaded
from trioengine.testing.fuzz.refusals import FOR_A_REQUEST, FOR_A_SESSION, check_overloaded


class Admissions:
    """Those of one engine."""

    def __init__(self, crashes: list[Exception]) -> None:
        self.requests: set[int] = set()  # that were admitted, by their ids
        self._crashes = crashes
        self._tickets = itertools.count()
        self._arrivals: dict[trio.lowlevel.Task, int] = {}
        self._is_serving = False

    def in_order(self, wait: Any) -> Any:
        """For `WaitingLine.wait`: nobody is served before one who came earlier and still waits."""

        async def watched(line: WaitingLine, admission: Callable[[], object], **options: bool | None) -> None:
            arrivals = self._arrivals
            own = arrivals[trio.lowlevel.current_task()] = next(self._tickets)

            def served() -> None:
                self._is_serving = True
                try:
                    admission()
                finally:
                    self._is_serving = False
                if any(arrivals[task] < own for task in line._waiters):
                    self._complain("somebody in a line was overtaken")

            await wait(line, served, **options)

        return watched

    def of_sessions(self, admit: Any) -> Any:
        """For `Gate.admit_session`."""

        def watched(gate: Gate) -> int:
            return self._watch(gate, admit, gate.sessions, FOR_A_SESSION)

        return watched

    def of_requests(self, admit: Any) -> Any:
        """For `Gate.admit_request`."""

        def watched(gate: Gate) -> int:
            request_id = self._watch(gate, admit, gate.requests, FOR_A_REQUEST)
            self.requests.add(request_id)
            return request_id

        return watched

    def _watch(self, gate: Gate, admit: Callable[[Gate], int], line: WaitingLine, codes: tuple[str, ...]) -> int:
        """Who is refused is told the truth; who is admitted without having waited does not overtake those who wait."""
        try:
            id = admit(gate)
        except EngineOverloaded as error:
            try:
                check_overloaded(error, gate, codes)
            except AssertionError as exc:
                self._crashes.append(exc)
            raise
        if len(line) and not self._is_serving:
            self._complain(f"a newcomer is admitted, and {len(line)} wait in the line")
        return id

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))
