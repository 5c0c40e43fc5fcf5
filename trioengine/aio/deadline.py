"""When a call's time is over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import trio

from trioengine.core.arguments import rejected
from trioengine.core.bounds import brief, counted, number
from trioengine.core.errors import TimedOut
from trioengine.core.types import Completion


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` on trio's clock, `timeout` seconds after the call."""

    at: float = math.inf
    timeout: float = math.inf

    def passed(self, progress: str, completion: Completion | None = None) -> TimedOut:
        """The error of a call that the deadline ends; `progress` is how far it had come: "while waiting: …"."""
        return TimedOut(f"timed out after {self.timeout:g} s {progress}", completion=completion)

    def passed_by(self, completion: Completion) -> TimedOut:
        """The error of a request that was running when the deadline passed."""
        if not completion.text:
            return self.passed("before any text", completion)
        came = counted(len(completion.text), "character")
        return self.passed(f"with {came} of the answer, which .completion holds", completion)


NEVER = Deadline()


def deadline_after(timeout: float | None) -> Deadline:
    """`timeout` seconds from now; None: never. Raises RequestRejected for a bad number."""
    if timeout is None:
        return NEVER
    try:
        seconds = number(timeout, 0, math.inf, above=True)
    except ValueError:
        raise rejected("timeout", f"must be positive seconds, got {brief(timeout)}") from None
    return Deadline(trio.current_time() + seconds, seconds)
