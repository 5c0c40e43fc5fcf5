"""How a request ended, and by whom if it was aborted."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trioengine.core.arguments import rejected
from trioengine.core.bounds import brief
from trioengine.core.errors import EngineError
from trioengine.core.messages import FinishReason


class Cause(enum.StrEnum):
    """Who aborted a request, or ended a session."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"
    SLEEP = "sleep"
    ABORT_ALL = "abort_all"
    SHUTDOWN = "shutdown"
    STALLED = "stalled"
    ERROR = "error"  # of a session: its actor crashed


def check_cause(cause: str) -> Cause:
    """Return the cause of this name. Raises RequestRejected for another one."""
    try:
        return Cause(cause)
    except ValueError:
        raise rejected("cause", f"must be one of {', '.join(Cause)}, got {brief(cause)}") from None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `cause` is set for ABORT, `error` for ERROR."""

    finish_reason: FinishReason
    cause: Cause | None = None
    error: EngineError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its own end."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
