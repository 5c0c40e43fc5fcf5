"""Typed errors and outcomes from the server's events, HTTP responses and close codes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trioengine.aio.websocket import ABNORMAL, Closed, Rejected
from trioengine.core.checks import number
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import (
    ConnectionLost,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    Outcome,
    RequestRejected,
    SamplingFailed,
    SessionBusy,
    SessionEnded,
    TransitionFailed,
    WorkerLost,
)
from trioengine.core.types import Cause, FinishReason, Usage

_IN_ITEM = re.compile(r"item(?:\.| '[^']*': )content\[(\d+)\](?:\.\w+)*")  # at the beginning of a message
GOING_AWAY, TRY_AGAIN_LATER = 1001, 1013
_HEADER = ", in the header Authorization: Bearer KEY"  # the client sends `api_key` in it


def error_of(problem: Mapping[str, Any]) -> EngineError:
    """The error in an error event or in the body of an HTTP response, as the engine itself would raise it."""
    code, message = str(problem.get("code")), str(problem.get("message"))
    match code:
        case "asleep":
            return EngineAsleep(message, retry_after=_retry_after(problem))
        case "shutting_down":
            return EngineClosed(message)
        case "worker_lost":
            return WorkerLost(message)
        case "transition_failed":
            return TransitionFailed(message)
        case "sampling_failed":
            return SamplingFailed(message)
        case "session_ended":
            return SessionEnded(message, cause=Cause.ERROR.value)
        case "conversation_already_has_active_response":
            return SessionBusy(message)
    has_hint = isinstance(problem.get("retry_after"), (int, float))
    if code == "overloaded" or problem.get("type") == "rate_limit_error" or has_hint:
        is_full = problem.get("type") == "rate_limit_error" or code == "too_many_connections"
        return EngineOverloaded(message, code=code, retry_after=_retry_after(problem), is_full=is_full)
    if problem.get("type") == "invalid_request_error":
        return RequestRejected(code, message.removesuffix(_HEADER), param=_param(problem.get("param")))
    return EngineError(message)


def abort_cause(problem: Mapping[str, Any]) -> Cause | None:
    """The cause of the abort, if the response failed because it was aborted."""
    return next((cause for cause in Cause if cause.value == problem.get("code")), None)


def refusal_of(rejected: Rejected, authority: str) -> EngineError:
    """The error of a handshake that the server answered by an HTTP response. An invalid key is named `api_key`."""
    try:
        problem = json.loads(rejected.body)["error"]
        error = error_of({"type": "invalid_request_error" if rejected.status < 429 else None, **problem})
    except (ValueError, LookupError, TypeError):
        return _stranger(authority, f"HTTP status {rejected.status}")
    if isinstance(error, RequestRejected) and error.code == "invalid_api_key":
        return RequestRejected(error.code, f"{error.message} (api_key)", param="api_key")
    return error


def unanswered(closed: Closed, authority: str) -> EngineError:
    """The error of a connection that was closed before the session began."""
    if closed.code != ABNORMAL:
        return loss_of(closed)
    return _stranger(authority, closed.reason or "it closed the connection", ABNORMAL)


def _stranger(authority: str, answer: str, code: int | None = None) -> ConnectionLost:
    return ConnectionLost(f"{authority} does not answer as trioengine does: {answer}", code=code)


def loss_of(closed: Closed, problem: Mapping[str, Any] | None = None) -> EngineError:
    """The error of a connection that the server closed, or that broke.

    `problem` is the latest error event about no event: the server had no room for a message.
    """
    if closed.code == GOING_AWAY:
        return EngineClosed(closed.reason or "the server has gone away")
    if closed.code == TRY_AGAIN_LATER and problem is not None:
        return error_of({**problem, "message": f"the connection to the server is gone: {problem.get('message')}"})
    if closed.code == ABNORMAL:
        reason = closed.reason or "the server died, or the network failed"
        return ConnectionLost(f"the connection to the server broke off: {reason}", code=ABNORMAL)
    return ConnectionLost(f"the connection to the server is gone: {closed}", code=closed.code)


def is_unread(problem: Mapping[str, Any]) -> bool:
    """Whether an error event about no event refuses a message: the server could not read the message's id.

    A request that waits for the answer to this message would wait without end.
    """
    return problem.get("type") == "invalid_request_error"


def _retry_after(problem: Mapping[str, Any]) -> float:
    try:
        return number(problem.get("retry_after"), 0, MAX_SECONDS, above=True)
    except ValueError:  # not a positive time
        return 1.0


def placed(error: EngineError, name: str, message: Mapping[str, Any]) -> EngineError:
    """The server's error about a message's item, with its place in the message, which is called `name` here."""
    if not isinstance(error, RequestRejected) or (found := _IN_ITEM.match(error.message)) is None:
        return error
    place = f"{name}.content" + ("" if isinstance(message["content"], str) else f"[{found[1]}]")
    return RequestRejected(error.code, place + error.message[found.end() :], param=place)


def _param(param: object) -> str | None:
    """The client's name of the invalid field."""
    if not isinstance(param, str):
        return None
    if param.startswith("item"):
        return "prompt"
    name = param.removeprefix("response.")
    return "max_tokens" if name == "max_output_tokens" else name


def outcome_of(response: dict[str, Any], cause: Cause | None, problem: EngineError | None) -> Outcome:
    """The outcome in a response.done.

    `cause` is the cause of the client's abort, if any; `problem` the error in an error event about the response.
    """
    match response["status"]:
        case "completed":
            return Outcome(FinishReason.STOP)
        case "incomplete":
            return Outcome(FinishReason.LENGTH)
        case "failed":
            failure = response["status_details"]["error"]
            aborted_by = abort_cause(failure)
            if aborted_by is None:
                return Outcome(FinishReason.ERROR, error=problem or error_of(failure))
            return Outcome(FinishReason.ABORT, aborted_by)
        case _:
            return Outcome(FinishReason.ABORT, cause or Cause.CLIENT)


def usage_of(response: dict[str, Any]) -> Usage:
    usage = response.get("usage") or {}
    cached = (usage.get("input_token_details") or {}).get("cached_tokens", 0)
    return Usage(usage.get("input_tokens", 0), usage.get("output_tokens", 0), cached)
