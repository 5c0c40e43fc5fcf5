"""The life of a session and the stages of the engine: THE state machines, as tables.

A session has a *phase* and an *attachment*. The phase is the state of its one request; the attachment is whether this
worker incarnation was sent ADD_SESSION, and END_SESSION, and has not reported SESSION_ENDED. Nothing else decides: the
actors look up `SESSION_TRANSITIONS[phase, attachment, event]`, take over the new state, and do the
actions, all in one synchronous step. All tables are in this one file, so that they can be read in one place.

A pair of state and event that is not in a table raises LocalProtocolError and changes nothing, with one exception:
events that come from outside, whatever the state (END, ABORT, the worker's death, …), are ignored in the states that
`SESSION_IGNORES` and `POWER_IGNORES` list, because there they have nothing left to do. An engine that drains ignores
all but its close, and one that sleeps or changes ignores READY and the death of its worker: its power actor decides.

Why the session table makes leaks impossible:

* Every way into ATTACHED posts ADD_SESSION, and the only ways out are DETACHING, which posts END_SESSION, and the death
  of the worker. Ending an attached session detaches it in the same step, so an attachment that is never ended cannot
  be expressed.
* END is legal in every state, and a second END does nothing.
* ABORT is legal in every state. It posts STOP_SESSION only for a request in flight; a finish that crosses it on the
  way is the event FINISH in STOPPING, and settles the request as finished: an abort never downgrades an answer.
* Exactly one SETTLE… action lies on every path from RESERVE back to a state without a request, so every accepted
  request has one entry in the ledger, and gives its slot back once.

A request in flight survives its attachment: where the worker dies, or is to sleep, it is SUSPENDED, and RESUME adds its
session and its tokens to a worker again. A request that cannot go on is given up in the same step. Rows that are on
their way while the attachment ends still count, and a finish among them is the outcome.

A request's outcome for its reader can be decided earlier (a stop string, a reader that left, a timeout); the phase is
about the worker, and the slot stays taken until the worker is done with the request: STOPPING and ENDING are still in
flight.

The engine has one *stage*. Users see it as a `Power`, which leaves out the details of a sleep or an update. Requests
in flight go on in the FINISHING stages, until QUIESCE; DRAIN and CLOSE are legal in every stage.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trioengine.core.errors import LocalProtocolError
from trioengine.core.types import TableEnum


class Phase(TableEnum):
    """The state of a session's request."""

    IDLE = "idle"  # no request
    PREPARING = "preparing"  # reserved; being templated and tokenized
    RUNNING = "running"  # ADD_MESSAGE posted
    STOPPING = "stopping"  # aborted; its last row is on its way
    SUSPENDED = "suspended"  # in flight, to be resumed by another attachment
    ENDING = "ending"  # the session's scope was left with a request in flight
    ENDED = "ended"  # no request any more


class Attachment(TableEnum):
    """Whether the worker holds the session."""

    DETACHED = "detached"
    ATTACHED = "attached"
    DETACHING = "detaching"  # END_SESSION posted; SESSION_ENDED is on its way


class Event(TableEnum):
    """An event in the life of a session."""

    RESERVE = "reserve"  # the gate admits a request
    REFUSE = "refuse"  # its preparation failed: a bad prompt, or the gate closed
    COMMIT = "commit"  # prepared, and the gate is still open
    ABORT = "abort"  # for any cause
    FINISH = "finish"  # its last row, or REQUEST_FAILED, arrived
    END = "end"  # the session's scope was left
    SESSION_ENDED = "session_ended"  # the worker has released it
    WORKER_LOST = "worker_lost"  # the incarnation is dead
    DETACH = "detach"  # the worker is to drop all state: it will sleep or load other weights
    RESUME = "resume"  # a worker is available for a suspended request
    GIVE_UP = "give_up"  # a suspended request will not be resumed


class Action(TableEnum):
    """A side effect, carried out in the same synchronous step."""

    POST_ADD_SESSION = "post ADD_SESSION"
    POST_ADD_MESSAGE = "post ADD_MESSAGE"
    POST_STOP_SESSION = "post STOP_SESSION"
    POST_END_SESSION = "post END_SESSION"
    SUSPEND = "suspend"
    SETTLE_AS_REPORTED = "settle as reported"  # by the last row or REQUEST_FAILED
    SETTLE_ABORTED = "settle as aborted"
    SETTLE_REFUSED = "settle as refused"
    SETTLE_LOST = "settle as lost"
    FREE_SESSION = "free the session slot"


@dataclass(frozen=True, slots=True)
class Transition:
    """The state after an event, and the actions to do."""

    phase: Phase
    attachment: Attachment
    actions: tuple[Action, ...] = ()


State: TypeAlias = tuple[Phase, Attachment]


def _table(rows: Mapping[State, Mapping[Event, Transition]]) -> dict[tuple[Phase, Attachment, Event], Transition]:
    return {(*state, event): transition for state, row in rows.items() for event, transition in row.items()}


_D, _A, _X = Attachment.DETACHED, Attachment.ATTACHED, Attachment.DETACHING
_ADD = (Action.POST_ADD_SESSION, Action.POST_ADD_MESSAGE)
_ABORTED, _FREE, _END = Action.SETTLE_ABORTED, Action.FREE_SESSION, Action.POST_END_SESSION
_REPORTED = Action.SETTLE_AS_REPORTED

SESSION_TRANSITIONS: Mapping[tuple[Phase, Attachment, Event], Transition] = _table(
    {
        (Phase.IDLE, _D): {
            Event.RESERVE: Transition(Phase.PREPARING, _D),
            Event.END: Transition(Phase.ENDED, _D, (_FREE,)),
        },
        (Phase.IDLE, _A): {
            Event.RESERVE: Transition(Phase.PREPARING, _A),
            Event.END: Transition(Phase.ENDED, _X, (_END,)),
            Event.WORKER_LOST: Transition(Phase.IDLE, _D),
            Event.DETACH: Transition(Phase.IDLE, _X, (_END,)),
        },
        (Phase.IDLE, _X): {
            Event.END: Transition(Phase.ENDED, _X),
            Event.SESSION_ENDED: Transition(Phase.IDLE, _D),
            Event.WORKER_LOST: Transition(Phase.IDLE, _D),
        },
        (Phase.PREPARING, _D): {
            Event.REFUSE: Transition(Phase.IDLE, _D, (Action.SETTLE_REFUSED,)),
            Event.COMMIT: Transition(Phase.RUNNING, _A, _ADD),
            Event.ABORT: Transition(Phase.IDLE, _D, (_ABORTED,)),
            Event.END: Transition(Phase.ENDED, _D, (_ABORTED, _FREE)),
        },
        (Phase.PREPARING, _A): {
            Event.REFUSE: Transition(Phase.IDLE, _A, (Action.SETTLE_REFUSED,)),
            Event.COMMIT: Transition(Phase.RUNNING, _A, (Action.POST_ADD_MESSAGE,)),
            Event.ABORT: Transition(Phase.IDLE, _A, (_ABORTED,)),
            Event.END: Transition(Phase.ENDED, _X, (_ABORTED, _END)),
            Event.WORKER_LOST: Transition(Phase.PREPARING, _D),
        },
        (Phase.RUNNING, _A): {
            Event.ABORT: Transition(Phase.STOPPING, _A, (Action.POST_STOP_SESSION,)),
            Event.FINISH: Transition(Phase.IDLE, _A, (_REPORTED,)),
            Event.END: Transition(Phase.ENDING, _X, (_END,)),
            Event.WORKER_LOST: Transition(Phase.SUSPENDED, _D, (Action.SUSPEND,)),
            Event.DETACH: Transition(Phase.SUSPENDED, _X, (_END, Action.SUSPEND)),
        },
        (Phase.STOPPING, _A): {
            Event.FINISH: Transition(Phase.IDLE, _A, (_REPORTED,)),
            Event.END: Transition(Phase.ENDING, _X, (_END,)),
            Event.WORKER_LOST: Transition(Phase.IDLE, _D, (_ABORTED,)),
            Event.DETACH: Transition(Phase.STOPPING, _X, (_END,)),
        },
        (Phase.STOPPING, _X): {
            Event.FINISH: Transition(Phase.IDLE, _X, (_REPORTED,)),
            Event.END: Transition(Phase.ENDING, _X),
            Event.SESSION_ENDED: Transition(Phase.IDLE, _D, (_ABORTED,)),
            Event.WORKER_LOST: Transition(Phase.IDLE, _D, (_ABORTED,)),
        },
        (Phase.SUSPENDED, _X): {
            Event.ABORT: Transition(Phase.STOPPING, _X),
            Event.FINISH: Transition(Phase.IDLE, _X, (_REPORTED,)),
            Event.END: Transition(Phase.ENDING, _X),
            Event.SESSION_ENDED: Transition(Phase.SUSPENDED, _D),
            Event.WORKER_LOST: Transition(Phase.SUSPENDED, _D),
        },
        (Phase.SUSPENDED, _D): {
            Event.RESUME: Transition(Phase.RUNNING, _A, _ADD),
            Event.GIVE_UP: Transition(Phase.IDLE, _D, (Action.SETTLE_LOST,)),
            Event.ABORT: Transition(Phase.IDLE, _D, (_ABORTED,)),
            Event.END: Transition(Phase.ENDED, _D, (_ABORTED, _FREE)),
        },
        (Phase.ENDING, _X): {
            Event.FINISH: Transition(Phase.ENDED, _X, (_REPORTED,)),
            Event.SESSION_ENDED: Transition(Phase.ENDED, _D, (_ABORTED, _FREE)),
            Event.WORKER_LOST: Transition(Phase.ENDED, _D, (_ABORTED, _FREE)),
        },
        (Phase.ENDED, _X): {
            Event.SESSION_ENDED: Transition(Phase.ENDED, _D, (_FREE,)),
            Event.WORKER_LOST: Transition(Phase.ENDED, _D, (_FREE,)),
        },
    }
)

SESSION_IGNORES: Mapping[Event, frozenset[Phase]] = {  # where the table has no row
    Event.ABORT: frozenset({Phase.IDLE, Phase.STOPPING, Phase.ENDING, Phase.ENDED}),  # no request, or it is aborted
    Event.END: frozenset({Phase.ENDING, Phase.ENDED}),
    Event.WORKER_LOST: frozenset({Phase.IDLE, Phase.PREPARING, Phase.SUSPENDED, Phase.ENDED}),  # detached
}


class SessionLifecycle:
    """The interpreter of the session table: one session's state."""

    __slots__ = ("attachment", "phase")

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.attachment = Attachment.DETACHED

    @property
    def is_attached(self) -> bool:
        """Whether the worker holds the session; END_SESSION may be on its way."""
        return self.attachment is not Attachment.DETACHED

    @property
    def is_open_on_worker(self) -> bool:
        """Whether the worker holds the session, and no END_SESSION was posted."""
        return self.attachment is Attachment.ATTACHED

    @property
    def is_detaching(self) -> bool:
        """Whether END_SESSION is posted and not answered: the session takes no request meanwhile."""
        return self.attachment is Attachment.DETACHING

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take the transition and return the actions to do now; none if the event is ignored.

        Raises LocalProtocolError, and changes nothing, if the event is illegal.
        """
        transition = SESSION_TRANSITIONS.get((self.phase, self.attachment, event))
        if transition is None:
            if self.phase in SESSION_IGNORES.get(event, ()):
                return ()
            raise LocalProtocolError(f"{event.value} while {self.phase.value} and {self.attachment.value}")
        self.phase = transition.phase
        self.attachment = transition.attachment
        return transition.actions

    def __repr__(self) -> str:
        return f"<SessionLifecycle {self.phase.value} {self.attachment.value}>"


class Power(enum.StrEnum):
    """The state of the engine as users see it; only AWAKE admits requests, while no sleep or update is pending."""

    LOADING = "loading"
    AWAKE = "awake"
    RESTARTING = "restarting"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"  # at least one tag
    WAKING = "waking"
    UPDATING = "updating"  # from AWAKE and back
    DRAINING = "draining"
    CLOSED = "closed"


class PowerStage(TableEnum):
    """The state of the engine in detail: each stage belongs to one Power, some Powers have several stages."""

    LOADING = "loading"
    AWAKE = "awake"
    RESTARTING = "restarting"
    FINISHING_TO_SLEEP = "finishing_to_sleep"  # requests in flight may finish
    FALLING_ASLEEP = "falling_asleep"  # they are suspended or over; sessions are detached, SLEEP is posted
    RETIRING = "retiring"  # level 2: the worker exits, and a fresh one takes its place, asleep
    ASLEEP = "asleep"  # at least one tag
    UPDATING_ASLEEP = "updating_asleep"
    WAKING = "waking"
    FINISHING_TO_UPDATE = "finishing_to_update"  # the files are checked; requests in flight may finish
    UPDATING = "updating"  # they are suspended or over; sessions are detached, UPDATE_WEIGHTS is posted
    DRAINING = "draining"
    CLOSED = "closed"

    @property
    def power(self) -> Power:
        """The state that users see."""
        return _POWER_OF[self]

    @property
    def runs_requests(self) -> bool:
        """Whether requests that were admitted before go to the worker."""
        return self in _RUNS_REQUESTS


_RUNS_REQUESTS = {
    PowerStage.AWAKE,
    PowerStage.FINISHING_TO_SLEEP,
    PowerStage.FINISHING_TO_UPDATE,
    PowerStage.DRAINING,
}
_OTHER_POWERS = {
    PowerStage.FINISHING_TO_SLEEP: Power.FALLING_ASLEEP,
    PowerStage.RETIRING: Power.FALLING_ASLEEP,
    PowerStage.UPDATING_ASLEEP: Power.ASLEEP,
    PowerStage.FINISHING_TO_UPDATE: Power.UPDATING,
}
_POWER_OF = {stage: _OTHER_POWERS.get(stage) or Power(stage.value) for stage in PowerStage}


class PowerEvent(TableEnum):
    """An event in the life of the engine."""

    READY = "ready"  # an incarnation is READY for requests
    WORKER_LOST = "worker_lost"
    SLEEP = "sleep"
    UPDATE = "update"
    QUIESCE = "quiesce"  # requests in flight have finished, or are not waited for any longer
    RETIRE = "retire"
    SLEPT = "slept"  # the memory is released, by the worker or by its death
    WAKE = "wake"
    WOKEN = "woken"  # every tag is awake
    PARTLY_WOKEN = "partly_woken"
    UPDATED = "updated"
    FAILED = "failed"  # a wake or an update, without effect
    LEFT_ALONE = "left_alone"  # a wake or an update ended without a worker that is ready
    DRAIN = "drain"
    CLOSE = "close"  # shutdown, or the engine gave up


_ENDS = {PowerEvent.DRAIN: PowerStage.DRAINING, PowerEvent.CLOSE: PowerStage.CLOSED}
_CHANGES = {PowerEvent.SLEEP: PowerStage.FINISHING_TO_SLEEP, PowerEvent.UPDATE: PowerStage.FINISHING_TO_UPDATE}

POWER_TRANSITIONS: Mapping[PowerStage, Mapping[PowerEvent, PowerStage]] = {
    PowerStage.LOADING: {PowerEvent.READY: PowerStage.AWAKE, **_ENDS},
    PowerStage.AWAKE: {PowerEvent.WORKER_LOST: PowerStage.RESTARTING, **_CHANGES, **_ENDS},
    PowerStage.RESTARTING: {PowerEvent.READY: PowerStage.AWAKE, **_CHANGES, **_ENDS},
    PowerStage.FINISHING_TO_SLEEP: {PowerEvent.QUIESCE: PowerStage.FALLING_ASLEEP, **_ENDS},
    PowerStage.FALLING_ASLEEP: {
        PowerEvent.RETIRE: PowerStage.RETIRING,
        PowerEvent.SLEPT: PowerStage.ASLEEP,
        **_ENDS,
    },
    PowerStage.RETIRING: {PowerEvent.SLEPT: PowerStage.ASLEEP, **_ENDS},
    PowerStage.ASLEEP: {
        PowerEvent.SLEEP: PowerStage.FALLING_ASLEEP,
        PowerEvent.UPDATE: PowerStage.UPDATING_ASLEEP,
        PowerEvent.WAKE: PowerStage.WAKING,
        **_ENDS,
    },
    PowerStage.UPDATING_ASLEEP: {
        PowerEvent.UPDATED: PowerStage.ASLEEP,
        PowerEvent.FAILED: PowerStage.ASLEEP,
        **_ENDS,
    },
    PowerStage.WAKING: {
        PowerEvent.WOKEN: PowerStage.AWAKE,
        PowerEvent.PARTLY_WOKEN: PowerStage.ASLEEP,
        PowerEvent.FAILED: PowerStage.ASLEEP,
        PowerEvent.LEFT_ALONE: PowerStage.RESTARTING,
        **_ENDS,
    },
    PowerStage.FINISHING_TO_UPDATE: {
        PowerEvent.QUIESCE: PowerStage.UPDATING,
        PowerEvent.FAILED: PowerStage.AWAKE,
        PowerEvent.LEFT_ALONE: PowerStage.RESTARTING,
        **_ENDS,
    },
    PowerStage.UPDATING: {
        PowerEvent.UPDATED: PowerStage.AWAKE,
        PowerEvent.FAILED: PowerStage.AWAKE,
        PowerEvent.LEFT_ALONE: PowerStage.RESTARTING,
        **_ENDS,
    },
    PowerStage.DRAINING: {PowerEvent.CLOSE: PowerStage.CLOSED},
    PowerStage.CLOSED: {},
}

_FOLLOW_WORKER = frozenset({PowerStage.LOADING, PowerStage.AWAKE, PowerStage.RESTARTING})
POWER_IGNORES: Mapping[PowerEvent, frozenset[PowerStage]] = {  # where the table has no row
    **dict.fromkeys(PowerEvent, frozenset(_ENDS.values())),  # nothing but CLOSE changes an engine that ends
    PowerEvent.READY: frozenset(PowerStage) - _FOLLOW_WORKER,
    PowerEvent.WORKER_LOST: frozenset(PowerStage),
}


def next_stage(stage: PowerStage, event: PowerEvent) -> PowerStage:
    """Return the engine's stage after an event. Raises LocalProtocolError if the event is illegal."""
    following = POWER_TRANSITIONS[stage].get(event)
    if following is None:
        if stage in POWER_IGNORES[event]:
            return stage
        raise LocalProtocolError(f"{event.value} while the engine is {stage.value}")
    return following
