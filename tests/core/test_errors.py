"""The errors carry what a caller decides by."""

from trioengine import EngineOverloaded, RequestRejected, SessionEnded, WorkerLost


def test_errors_carry_their_fields():
    overloaded = EngineOverloaded("full", code="queue", retry_after=2.0)
    assert (str(overloaded), overloaded.code, overloaded.retry_after) == ("full", "queue", 2.0)
    rejected = RequestRejected("invalid_value", "no", param="prompt")
    assert (str(rejected), rejected.code, rejected.message, rejected.param) == ("no", "invalid_value", "no", "prompt")
    assert SessionEnded("over", cause="client").cause == "client"
    lost = WorkerLost("gone", exit_code=-9, traceback="Traceback")
    assert (lost.exit_code, lost.traceback) == (-9, "Traceback")
