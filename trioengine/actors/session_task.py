"""The task of a session: it keeps the request's deadline, and its scope is the session's life."""

from __future__ import annotations

import math

import trio

from trioengine.actors.gate import Gate
from trioengine.actors.session_actor import SessionActor
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import Cause


async def run_session(session: SessionActor, gate: Gate) -> None:
    """Abort a request whose deadline passes, until the session has ended; cancelled, end it and close the engine."""
    try:
        while session.end_cause is None:
            request = session.request
            deadline = math.inf if request is None or request.outcome is not None else request.deadline.at
            if not await _came_in_time(session.task_wake, deadline) and request is not None:
                session.abort_request(request, Cause.TIMEOUT)
                session.leave(request)  # decided now: a finish on its way is too late
            if session.end_cause is None:
                session.task_wake = trio.Event()
    except Exception as exc:
        session.crash(exc)
    finally:
        if session.end_cause is None:  # cancelled with the engine, maybe as its first task
            gate.change_power(PowerEvent.CLOSE)
        session.end(Cause.SHUTDOWN)


async def _came_in_time(event: trio.Event, deadline: float) -> bool:
    """Wait for the event; False if the deadline passes first, on trio's clock."""
    if deadline == math.inf:
        await event.wait()  # without a scope, which most sessions never need
        return True
    with trio.move_on_at(deadline) as scope:
        await event.wait()
    return not scope.cancelled_caught
