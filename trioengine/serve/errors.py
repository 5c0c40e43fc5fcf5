"""Errors as clients see them, in OpenAI's shape; nothing internal is disclosed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core import messages
from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineOverloaded,
    RequestRejected,
    SamplingFailed,
    SessionEnded,
    TimedOut,
    TransitionFailed,
    WorkerLost,
)
from trioengine.core.types import Cause

logger = logging.getLogger("trioengine")
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
_STATUS = {  # of refused requests, by code; others are 400
    "model_not_found": 404,
    "adapter_not_found": 404,
    "adapter_exists": 409,
    messages.ADAPTER_FAILED: 500,
    "session_not_found": 404,
    "events_dropped": 410,
    "no_weights_dir": 403,
    "weights_not_found": 404,
    "image_dropped": 409,  # the same request may be sent again
    "too_large": 413,
    "no_chat_template": 422,
    "template_error": 422,
    "no_token_left": 422,
}
# The end of a message. The client itself has not aborted a request that it still waits for.
_ABORTED: Mapping[Cause | None, str] = {
    Cause.CLIENT: "by an operator",
    Cause.ABORT_ALL: "by an operator, with all others",
    Cause.SHUTDOWN: "by the server's shutdown",
    Cause.SLEEP: "by an operator: the engine sleeps, or gets other weights",
    Cause.TIMEOUT: "by its timeout",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it; `retry_after` is in seconds."""

    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"type": self.type, "code": self.code, "message": self.message, "param": self.param}
        return shown if self.retry_after is None else {**shown, "retry_after": self.retry_after}


class ClientError(Exception):
    """Refuses a request of a client; `problem` describes the error."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(INVALID_REQUEST, code, message, param)


class OverBudget(ClientError):
    """Refuses more bytes or sessions of a client; `status` is for an HTTP response."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.code, problem.message)
        self.status = status
        self.problem = problem


class RequestAborted(Exception):
    """A request was aborted, and not by the disconnect of its client."""

    def __init__(self, cause: Cause | None) -> None:
        super().__init__(cause)
        self.cause = cause


def problem_of(error: Exception) -> Problem:
    """Return the client's view of an error; a bug of ours is an `internal_error` without details."""
    match error:
        case ClientError():
            return error.problem
        case RequestRejected(code=messages.ADAPTER_FAILED):
            logger.error("%s", error.message)  # it has a path
            return Problem(SERVER_ERROR, error.code, "the adapter cannot be loaded any more")
        case RequestRejected():
            return Problem(INVALID_REQUEST, error.code, error.message, error.param)
        case EngineOverloaded():
            kind = RATE_LIMIT if error.is_full else SERVER_ERROR
            return Problem(kind, "overloaded", str(error), retry_after=error.retry_after)
        case RequestAborted():
            code = error.cause.value if error.cause not in (None, Cause.CLIENT) else "aborted"
            return Problem(SERVER_ERROR, code, f"the request was aborted {_ABORTED.get(error.cause, f'({code})')}")
        case TimedOut():
            return problem_of(RequestAborted(Cause.TIMEOUT))
        case EngineAsleep():
            return Problem(SERVER_ERROR, "asleep", str(error), retry_after=error.retry_after)
        case EngineClosed():
            return Problem(SERVER_ERROR, "shutting_down", "the server is shutting down")
        case WorkerLost():
            return Problem(SERVER_ERROR, "worker_lost", "the worker process was lost before the answer was whole")
        case SamplingFailed():
            return Problem(SERVER_ERROR, "sampling_failed", str(error))
        case SessionEnded():
            return Problem(SERVER_ERROR, "session_ended", str(error))
        case TransitionFailed():
            return Problem(SERVER_ERROR, "transition_failed", str(error))
        case _:
            return Problem(SERVER_ERROR, "internal_error", "internal error")


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    match error:
        case OverBudget():
            return error.status
        case ClientError():
            return _STATUS.get(error.problem.code, 400)
        case RequestRejected():
            return _STATUS.get(error.code, 400)
        case EngineOverloaded():
            return 429 if error.is_full else 503
        case RequestAborted():
            return 503 if error.cause in (Cause.SHUTDOWN, Cause.SLEEP) else 500
        case EngineAsleep() | EngineClosed() | WorkerLost():
            return 503
        case TransitionFailed():
            return 409
        case _:
            return 500
