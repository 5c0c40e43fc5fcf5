"""What a client is told when something went wrong, in OpenAI's shape; nothing internal is echoed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineOverloaded,
    RequestRejected,
    SessionEnded,
    WorkerLost,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it; `retry_after` in seconds."""

    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"type": self.type, "code": self.code, "message": self.message, "param": self.param}
        return shown if self.retry_after is None else {**shown, "retry_after": self.retry_after}


class ClientError(Exception):
    """What a client asked for cannot be done; `problem` says why."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(INVALID_REQUEST, code, message, param)


def problem_of(error: Exception) -> Problem:
    """The client's view of an error; a bug of ours is `internal_error` and says no more."""
    match error:
        case ClientError():
            return error.problem
        case RequestRejected():
            return Problem(INVALID_REQUEST, error.code, error.message, error.param)
        case EngineOverloaded():
            return Problem(RATE_LIMIT, "overloaded", str(error), retry_after=error.retry_after)
        case EngineAsleep():
            return Problem(SERVER_ERROR, "asleep", str(error))
        case EngineClosed():
            return Problem(SERVER_ERROR, "shutting_down", "the server is shutting down")
        case WorkerLost():
            return Problem(SERVER_ERROR, "worker_lost", "the worker process was lost; the conversation goes on")
        case SessionEnded():
            return Problem(SERVER_ERROR, "session_ended", str(error))
        case _:
            return Problem(SERVER_ERROR, "internal_error", "internal error")
