"""Calls of an operator with an argument that is refused: they raise at once, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.testing.fuzz import inside

TOO_LONG = "x" * 5000
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # by a name: the argument that is wrong, and the call
    "sleep at level 0": ("level", lambda engine: engine.sleep(0)),
    "sleep at level 3": ("level", lambda engine: engine.sleep(3, mode="keep")),
    "sleep at level True": ("level", lambda engine: engine.sleep(True)),
    "sleep in an unknown mode": ("mode", lambda engine: engine.sleep(2, mode="now")),
    "sleep without a mode": ("mode", lambda engine: engine.sleep(mode=None)),
    "sleep after -1 s": ("timeout", lambda engine: engine.sleep(mode="wait", timeout=-1)),
    "sleep after nan s": ("timeout", lambda engine: engine.sleep(mode="wait", timeout=math.nan)),
    "sleep with a timeout for nothing": ("timeout", lambda engine: engine.sleep(mode="abort", timeout=1.0)),
    "sleep and maybe keep those that wait": ("keep_waiting", lambda engine: engine.sleep(keep_waiting=None)),
    "wake an unknown tag": ("tags", lambda engine: engine.wake("disk")),
    "wake an unknown tag as well": ("tags", lambda engine: engine.wake(["weights", "disk"])),
    "wake no tag": ("tags", lambda engine: engine.wake([])),
    "wake a number": ("tags", lambda engine: engine.wake(5)),
    "wake and maybe reload": ("reload", lambda engine: engine.wake(reload=None)),
    "update to nothing": ("path", lambda engine: engine.update_weights("")),
    "update to None": ("path", lambda engine: engine.update_weights(None, mode="keep")),
    "update to two lines": ("path", lambda engine: engine.update_weights("new\nnew")),
    "update to a long path": ("path", lambda engine: engine.update_weights(TOO_LONG)),
    "update in an unknown mode": ("mode", lambda engine: engine.update_weights("new", mode="now")),
    "update after -1 s": ("timeout", lambda engine: engine.update_weights("new", mode="wait", timeout=-1)),
    "update with a timeout for nothing": ("timeout", lambda engine: engine.update_weights("new", timeout=1.0)),
    "drain for -1 s": ("timeout", lambda engine: engine.drain(-1)),
    "audit for nan s": ("timeout", lambda engine: engine.check_invariants(timeout=math.nan)),
}


async def check_refused_call(engine: Engine, name: str) -> None:
    """Make the call of this name: it is refused in its first step, and the engine is as it was before."""
    param, call = CALLS[name]
    before, refusal = _state_of(engine), None
    try:
        await call(engine)
    except EngineError as exc:
        refusal = exc
    after = _state_of(engine)
    is_due = isinstance(refusal, RequestRejected) and (refusal.code, refusal.param) == ("invalid_value", param)
    assert is_due, f"{name}: the refusal is {refusal!r}, and not about {param}"
    changed = [f"{one} became {other}" for one, other in zip(before, after, strict=True) if one != other]
    assert not changed, f"{name}: it was refused, and {'; '.join(changed)}"


def _state_of(engine: Engine) -> tuple[object, ...]:
    sessions = [(each, inside.phase(each), each.end_cause) for each in inside.sessions(engine)]
    requests = [(session, request, request.outcome) for session, request in inside.requests(engine)]
    changes = inside.num_changes(engine), inside.num_waiting(engine)
    return engine.power, inside.stage(engine), engine.weights, engine.statistics(), changes, sessions, requests
