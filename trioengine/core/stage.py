"""How far an incarnation has come, and in which stages each message may be sent."""

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
    """How far an incarnation has come."""

    NEW = "new"
    CONFIGURED = "configured"
    READY = "ready"
    FAILED = "failed"  # FATAL was said


_ALIVE = frozenset({Stage.NEW, Stage.CONFIGURED, Stage.READY})
_CROSSING = frozenset({Stage.FAILED})  # what we say may cross FATAL on the way; nothing follows FATAL from the worker
STAGES: dict[type, frozenset[Stage]] = {
    Configure: frozenset({Stage.NEW}),
    AddSession: frozenset({Stage.READY}) | _CROSSING,
    AddMessage: frozenset({Stage.READY}) | _CROSSING,
    StopSession: frozenset({Stage.READY}) | _CROSSING,
    EndSession: frozenset({Stage.READY}) | _CROSSING,
    Audit: frozenset({Stage.READY}) | _CROSSING,
    Ping: _ALIVE | _CROSSING,
    Sleep: frozenset({Stage.READY}) | _CROSSING,
    Wake: frozenset({Stage.READY}) | _CROSSING,
    UpdateWeights: frozenset({Stage.READY}) | _CROSSING,
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
