"""The errors carry the facts that callers decide by."""

from copy import copy

import pytest

from trioengine import (
    ConnectionLost,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    RequestRejected,
    SamplingFailed,
    SessionEnded,
    TimedOut,
    UnknownArgument,
    WorkerLost,
)
from trioengine.core.errors import session_error
from trioengine.core.types import Cause, Completion, FinishReason, Usage


def test_errors_carry_their_fields():
    overloaded = EngineOverloaded("full", code="queue", retry_after=2.0)
    assert (str(overloaded), overloaded.code, overloaded.retry_after) == ("full", "queue", 2.0)
    rejected = RequestRejected("invalid_value", "no", param="prompt")
    assert (str(rejected), rejected.code, rejected.message, rejected.param) == ("no", "invalid_value", "no", "prompt")
    assert SessionEnded("over", cause="client").cause == "client"
    ended = SessionEnded.by("shutdown")
    assert (str(ended), ended.cause) == ("the session has ended (shutdown): open another one", "shutdown")
    ended, closed = session_error(Cause.TIMEOUT), session_error(Cause.SHUTDOWN)
    assert isinstance(ended, SessionEnded) and ended.cause == "timeout" and isinstance(closed, EngineClosed)
    assert TimedOut("late").completion is None
    lost = WorkerLost("gone", exit_code=-9, traceback="Traceback")
    assert (lost.exit_code, lost.traceback) == (-9, "Traceback")


@pytest.mark.parametrize("cause", [None, KeyError("why")])
@pytest.mark.parametrize(
    "error",
    [
        EngineError("plain"),
        EngineAsleep("asleep", retry_after=2.0),
        EngineOverloaded("full", code="queue", retry_after=2.0),
        RequestRejected("invalid_value", "no", param="prompt"),
        SessionEnded("over", cause="client"),
        WorkerLost("gone", exit_code=-9, traceback="Traceback"),
        ConnectionLost("gone", code=1006),
        TimedOut("late", completion=Completion(1, "hi", (7,), None, FinishReason.ABORT, Cause.TIMEOUT, Usage(3, 1, 0))),
        SamplingFailed("logits are not finite"),
        UnknownArgument("sleep() has no argument 'mod'"),
    ],
)
def test_a_copy_is_the_same_error_that_was_not_raised(error, cause):
    with pytest.raises(type(error)) as caught:
        raise error from cause
    twin = copy(caught.value)
    assert (type(twin), str(twin), vars(twin), twin.args) == (type(error), str(error), vars(error), error.args)
    assert twin is not error
    assert twin.__traceback__ is None
    assert twin.__cause__ is cause
    assert error.__traceback__ is not None
