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

    An error that is kept is not raised itself, but a copy of it each time: raised twice, it would gather tracebacks.
    """

    def __copy__(self) -> Self:
        """The same error, without the traceback and the context of where this one was raised."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        twin.__cause__, twin.__suppress_context__ = self.__cause__, self.__suppress_context__
        return twin


class InvalidConfig(EngineError, ValueError):
    """A field of a configuration has a value that cannot be used; the message names the field.

    `fields` are the names that the message holds, the first one at its beginning.
    """

    def __init__(self, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields

    @classmethod
    def of(cls, field: str, problem: str) -> Self:
        """The error of one field."""
        return cls(f"{field} {problem}", fields=(field,))


class ModelError(EngineError):
    """The model cannot be found, read or run; the message names the file, field or architecture."""


class EngineAsleep(EngineError):
    """The engine sleeps, is on its way there or back, or gets other weights: it admits nothing.

    `retry_after` is a hint in seconds: when to ask again, as nobody knows when it is woken.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(EngineError):
    """The engine has ended, is ending, or drains; nothing is admitted any more."""


class EngineOverloaded(EngineError):
    """No capacity at the moment.

    `code` is one of `sessions`, `queue`, `loading`, `restarting`, or for an audit the engine's state; `retry_after` is
    a hint in seconds. `is_full`: the engine runs, and only a free slot is missing.
    """

    def __init__(self, message: str, *, code: str, retry_after: float = 1.0, is_full: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.is_full = is_full


class TimedOut(EngineError):
    """The `timeout` of a call has passed; a request has been aborted, and its turn taken back unless it is kept.

    `completion` is the partial answer, with the finish reason `abort` and the cause `timeout`; its text is empty if the
    request never started. None where no request was made: a session was to be opened.
    """

    def __init__(self, message: str, *, completion: Completion | None = None) -> None:
        super().__init__(message)
        self.completion = completion


class RequestRejected(EngineError, ValueError):
    """One request cannot be run as it stands; nothing else is disturbed.

    `code` is a stable word (`invalid_value`, `empty_prompt`, `context_length_exceeded`, `too_large`, …), `param`
    names the field at fault where there is one.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @classmethod
    def at(cls, where: str, code: str, problem: str) -> Self:
        """The error of one part of a request."""
        return cls(code, f"{where}: {problem}", param=where)


class UnknownArgument(EngineError, TypeError):
    """A call has no argument of this name; the message holds the nearest that it has."""


class SamplingFailed(EngineError):
    """No token could be chosen for one request, for a reason that lies in the model, as logits that are not finite.

    Other requests are not disturbed.
    """


class SessionBusy(EngineError):
    """The session already runs a request; it is not disturbed."""


class SessionEnded(EngineError):
    """The session has ended; `cause` says why (`client`, `shutdown`, `error`, …)."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class WorkerLost(EngineError):
    """The worker process died, hung or could not start.

    `exit_code` is its exit status (negative: the signal that killed it) where known, `traceback` what it said last.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.traceback = traceback


class ConnectionLost(EngineError):
    """A server cannot be reached, or the connection to it is gone; `code` is that of its WebSocket's close, if any."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class TransitionFailed(EngineError):
    """A change of power state (sleep, wake, update) did not succeed."""


class InvariantError(EngineError):
    """The books do not balance; the message says which clause, and by how much."""


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


class ProtocolError(EngineError):
    """The rules between the engine and its worker were broken."""


class LocalProtocolError(ProtocolError):
    """We tried to break them: a bug on this side; no state was changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke them: the connection is of no further use."""


class FrameTooLarge(LocalProtocolError):
    """A message does not fit a frame; nothing was changed, and the connection goes on."""
