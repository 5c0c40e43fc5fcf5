"""Mutants of the gate and the books."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import trio
from mutant import Mutant, replaced, together

from trioengine.actors.engine import Engine
from trioengine.actors.gate import Gate
from trioengine.actors.session import Session
from trioengine.actors.sessions import Sessions
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.ledger import Ledger, RequestState
from trioengine.core.types import Cause, FinishReason


def _reuse_ids(init: Any) -> Any:
    def mutant(self: Engine, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self.runtime.gate.mint = partial(_smallest_free_id, self)  # type: ignore[method-assign]

    return mutant


def _smallest_free_id(engine: Engine) -> int:
    requests = [session.request.id for session in engine.runtime.sessions if session.request is not None]
    used = {*(session.id for session in engine.runtime.sessions), *requests, *engine.runtime.auditor._pending}
    return next(id for id in itertools.count(1) if id not in used)


def _forget_the_waiting(settle: Any) -> Any:
    def mutant(self: Ledger, stand: RequestState, finish_reason: FinishReason, *cause: Cause | None) -> None:
        settle(self, stand, finish_reason, *cause)
        if stand is RequestState.WAITING and finish_reason is FinishReason.ABORT:
            self.finish_reasons[finish_reason] -= 1

    return mutant


def _serve_nobody(serve: Any) -> Any:
    def mutant(self: WaitingLine) -> None:
        if len(self) != 1:  # the last one in the line is forgotten
            serve(self)

    return mutant


def _abort_none(self: Sessions, cause: Cause) -> int:
    return 0


def _abort_the_line_last(abort_all: Any) -> Any:
    def mutant(self: Engine, cause: Cause = Cause.ABORT_ALL, *, keep_waiting: bool = False) -> int:
        num_aborted: int = abort_all(self, cause, keep_waiting=True)  # their slots go to the first in line
        return num_aborted if keep_waiting else num_aborted + self.runtime.sessions.abort_waiting(cause)

    return mutant


def _count_none(self: Ledger, cause: Cause) -> None:
    """The books know nothing of it."""


class _Locked:
    """One lock for all: to open a session, and to leave one. Who waits for a slot holds it; nobody can give one."""

    def __init__(self) -> None:
        self.locks: dict[Gate, trio.Lock] = {}

    def of(self, gate: Gate) -> trio.Lock:
        if gate not in self.locks:
            self.locks = {gate: trio.Lock()}
        return self.locks[gate]


_LOCKED = _Locked()


def _open_under_the_lock(aenter: Any) -> Any:
    async def mutant(self: Session) -> Any:
        async with _LOCKED.of(self._runtime.gate):
            return await aenter(self)

    return mutant


def _leave_under_the_lock(aexit: Any) -> Any:
    async def mutant(self: Session, *exc: Any) -> None:
        lock = _LOCKED.of(self._runtime.gate)
        with trio.CancelScope(shield=True):  # else it is F10
            await lock.acquire()
        try:
            await aexit(self, *exc)
        finally:
            lock.release()

    return mutant


GATE_MUTANTS = (
    Mutant(
        "F5",
        "ids are used again",
        replaced(Engine, "__init__", _reuse_ids),
        shows=r"is not newer than|in flight|goes on|the model's|holds sessions|the prompt has|abort\(\) returned"
        "|history is|do not ascend|turns are of one kind",
    ),
    Mutant(
        "F11",
        "who waits for a slot holds the lock that is needed to give one back",
        together(
            replaced(Session, "__aenter__", _open_under_the_lock), replaced(Session, "__aexit__", _leave_under_the_lock)
        ),
        shows=r"(waits? forever|goes on)[\s\S]*(lock\.acquire|_LOCKED)|the worker holds sessions|slots are taken"
        r"|has not ended|it waits forever: <holder|is not to wait, and waits|to be opened, and waits on",
    ),
    Mutant(
        "F28",
        "an abort before the first token is not counted",
        replaced(Ledger, "settle", _forget_the_waiting),
        shows="received .* != settled|the counts do not add up",
    ),
    Mutant(
        "F35",
        "a slot is free, and nobody who waits is admitted",
        replaced(WaitingLine, "serve", _serve_nobody),
        shows="waits? forever|callers wait, though the first of them need not|in flight|a newcomer is admitted"
        "|wait for room, and the first has room",
    ),
    Mutant(
        "F6b",
        "an abort of all is lost in the line for a slot",
        replaced(Sessions, "abort_waiting", lambda _: _abort_none),
        shows=r"abort_all\(\) returned|wait in line",
    ),
    Mutant(
        "F68",
        "an abort of all spares a request that gets the slot of an aborted one",
        replaced(Engine, "abort_all", _abort_the_line_last),
        shows=r"abort_all\(\) returned|all were aborted, and it goes on",
    ),
    Mutant(
        "F28b",
        "a request that leaves the line is not counted",
        replaced(Ledger, "leave_line", lambda _: _count_none),
        shows="the books count",
    ),
)
