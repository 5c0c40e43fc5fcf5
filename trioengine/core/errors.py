"""The typed errors that trioengine raises, and the outcome of a request, which may be one of them.

Errors of the protocol between the engine and its worker have two directions of blame: ours (LocalProtocolError) and the
peer's (RemoteProtocolError).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from trioengine.core.types import Cause, Completion, FinishReason


class EngineError(Exception):
    """Base of every error that trioengine raises on purpose.

    A stored error is never raised itself: each time a copy of it is, so that tracebacks do not pile up.
    """

    def __copy__(self) -> Self:
        """Return the same error without traceback and context."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        twin.__cause__, twin.__suppress_context__ = self.__cause__, self.__suppress_context__
        return twin


class InvalidConfig(EngineError, ValueError):
    """A field of a configuration has an invalid value; the message begins with the field.

    `fields` are the fields named in the message, in their order.
    """

    def __init__(self, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields

    @classmethod
    def of(cls, field: str, problem: str) -> Self:
        """Make the error of one field."""
        return cls(f"{field} {problem}", fields=(field,))


class ModelError(EngineError):
    """The model cannot be found, read or run; the message names the file, field or architecture."""


class EngineAsleep(EngineError):
    """The engine sleeps, is falling asleep or waking, or updates its weights: it admits nothing.

    `retry_after` is a hint in seconds for the next attempt; the time of the next wake is not known.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(EngineError):
    """The engine has ended, is ending, or drains: it admits nothing any more."""


class EngineOverloaded(EngineError):
    """The engine has no capacity at the moment.

    `code` is one of `sessions`, `queue`, `loading`, `restarting`, or for an audit the engine's state; `retry_after` is
    a hint in seconds. `is_full`: the engine runs, and all its slots are taken.
    """

    def __init__(self, message: str, *, code: str, retry_after: float = 1.0, is_full: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.is_full = is_full


class TimedOut(EngineError):
    """The `timeout` of a call has passed; its request was aborted, and its turn removed unless it is kept.

    `completion` is the partial answer, with the finish reason `abort` and the cause `timeout`; its text is empty if the
    request never started. None if the call was to open a session.
    """

    def __init__(self, message: str, *, completion: Completion | None = None) -> None:
        super().__init__(message)
        self.completion = completion


class RequestRejected(EngineError, ValueError):
    """A request is invalid; other requests are not affected.

    `code` is a stable word (`invalid_value`, `empty_prompt`, `context_length_exceeded`, `too_large`, …), `param`
    is the field at fault, if any.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @classmethod
    def at(cls, where: str, code: str, problem: str) -> Self:
        """Make the error of one part of a request."""
        return cls(code, f"{where}: {problem}", param=where)


class UnknownArgument(EngineError, TypeError):
    """A call has no argument of this name; the message suggests the nearest known one."""


class SamplingFailed(EngineError):
    """No token could be sampled for a request because of the model's output, such as logits that are not finite.

    Other requests are not affected.
    """


class SessionBusy(EngineError):
    """The session already runs a request, which is not affected."""


class SessionEnded(EngineError):
    """The session has ended; `cause` is the reason (`client`, `shutdown`, `error`, …)."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause

    @classmethod
    def by(cls, cause: str) -> Self:
        """The error of a session that has ended for this reason."""
        return cls(f"the session has ended ({cause}): open another one", cause=cause)


def session_error(cause: Cause) -> EngineError:
    """The error of a session that has ended for this cause: SessionEnded, or EngineClosed if the engine has."""
    return EngineClosed("the engine is closed") if cause is Cause.SHUTDOWN else SessionEnded.by(cause.value)


class WorkerLost(EngineError):
    """The worker process died, hung or could not start.

    `exit_code` is its exit status (negative: the signal that killed it), `traceback` its last report, if known.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.traceback = traceback


class ConnectionLost(EngineError):
    """A server cannot be reached, or the connection to it is lost; `code` is the WebSocket's close code, if any."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class TransitionFailed(EngineError):
    """A change of power state (sleep, wake, update) did not succeed."""


class InvariantError(EngineError):
    """The engine's accounts do not balance; the message has the clause and the counts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `cause` is set for ABORT, `error` for ERROR."""

    finish_reason: FinishReason
    cause: Cause | None = None
    error: EngineError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its own end."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


class ProtocolError(EngineError):
    """A rule of the protocol between the engine and its worker was broken."""


class LocalProtocolError(ProtocolError):
    """This side tried to break a rule: our bug; no state was changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; the connection cannot be used any more."""


class FrameTooLarge(LocalProtocolError):
    """A message does not fit a frame; nothing was changed, and the connection stays usable."""
