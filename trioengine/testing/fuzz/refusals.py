"""Whether a refusal is true: judged in the moment in which somebody is told, as a slot may be free a step later."""

from __future__ import annotations

import math

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.gate import Gate
from trioengine.actors.waiting_line import waits_for
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineError, EngineOverloaded, TimedOut
from trioengine.core.lifecycle import Power

FOR_A_SESSION = ("sessions", "loading")  # codes
FOR_A_REQUEST = ("queue", "loading", "restarting", "draining")
FOR_AN_AUDIT = tuple(power.value for power in Power)  # where there is no worker


def check_overloaded(error: EngineOverloaded, gate: Gate, codes: tuple[str, ...]) -> None:
    """There is no slot, or no worker, of the kind that it names; its code is one of these."""
    config, ledger = gate._config, gate.ledger
    assert error.code in codes, f"refused for {error.code}, which is no reason here"
    match error.code:
        case "sessions":
            taken, slots = ledger.sessions, config.max_sessions
            assert taken == slots, f"{taken} of {slots} session slots are taken, and {error!r}"
        case "queue":
            taken, slots = ledger.in_flight, config.max_num_seqs + config.max_num_queued_reqs
            assert taken == slots, f"{taken} of {slots} slots are taken, and {error!r}"
        case code:
            is_true = code == gate.power.value and gate.power is not Power.AWAKE
            assert is_true, f"the engine is {gate.power.value}, and refuses for {code}"


def check_refused(
    error: EngineError, engine: Engine, codes: tuple[str, ...], *, wait: bool | None, deadline: float = math.inf
) -> None:
    """A call is refused: not for the lack that it waits out, and with TimedOut not before the deadline.

    A call with `wait=None` may be refused in the line and resume a pass later, in another state of the engine; its
    reason was checked when it was refused (Admissions).
    """
    if isinstance(error, TimedOut):
        assert trio.current_time() >= deadline, f"it has time until {deadline}, and got {error!r}"
    if isinstance(error, EngineOverloaded | EngineAsleep):
        if isinstance(error, EngineOverloaded) and error.code == "payloads":
            return  # judged where there was no room (PayloadWatch)
        assert not waits_for(error, wait), f"it was to wait, and got {error!r}"
        if wait is None and isinstance(error, EngineOverloaded):
            assert error.code in codes, f"refused for {error.code}, which is no reason here"
        elif isinstance(error, EngineOverloaded):
            check_overloaded(error, engine.gate, codes)
        elif wait is not None:
            assert not engine.gate.is_awake, f"the engine is awake, and {error!r}"


def check_not_admitted(error: EngineError, engine: Engine, *, wait: bool | None, deadline: float) -> None:
    """No session is opened for a caller."""
    check_refused(error, engine, FOR_A_SESSION, wait=wait, deadline=deadline)
    if isinstance(error, EngineClosed):
        power = engine.gate.power
        assert power in (Power.DRAINING, Power.CLOSED), f"the engine is {power.value}, and {error!r}"
