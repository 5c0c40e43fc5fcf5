"""The stages of an incarnation, and those in which each message may be sent."""

from __future__ import annotations

import enum

from trioengine.core.messages import (
    AddMessage,
    AddSession,
    Audit,
    Audited,
    Configure,
    EndSession,
    Fatal,
    Loading,
    PayloadConsumed,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Shutdown,
    Sleep,
    Slept,
    StopSession,
    Tokens,
    Updated,
    UpdateWeights,
    Wake,
    Woken,
)


class Stage(enum.Enum):
    """A stage of an incarnation."""

    NEW = "new"
    CONFIGURED = "configured"
    READY = "ready"
    FAILED = "failed"  # FATAL was sent


_ALIVE = frozenset({Stage.NEW, Stage.CONFIGURED, Stage.READY})
_CROSSING = frozenset({Stage.FAILED})  # our message may cross FATAL on the way; the worker sends none after FATAL
_SERVING = frozenset({Stage.READY}) | _CROSSING
STAGES: dict[type, frozenset[Stage]] = {
    Configure: frozenset({Stage.NEW}),
    AddSession: _SERVING,
    AddMessage: _SERVING,
    StopSession: _SERVING,
    EndSession: _SERVING,
    Audit: _SERVING,
    Ping: _ALIVE | _CROSSING,
    Sleep: _SERVING,
    Wake: _SERVING,
    UpdateWeights: _SERVING,
    Shutdown: _ALIVE | _CROSSING,
    Loading: frozenset({Stage.CONFIGURED}),
    Ready: frozenset({Stage.CONFIGURED}),
    Tokens: frozenset({Stage.READY}),
    RequestFailed: frozenset({Stage.READY}),
    SessionEnded: frozenset({Stage.READY}),
    PayloadConsumed: frozenset({Stage.READY}),
    Audited: frozenset({Stage.READY}),
    Pong: _ALIVE,
    Slept: frozenset({Stage.READY}),
    Woken: frozenset({Stage.READY}),
    Updated: frozenset({Stage.READY}),
    Fatal: _ALIVE,
}
