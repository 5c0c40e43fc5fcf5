"""Mutants of the gate and the books."""

from __future__ import annotations

from typing import Any

import trio

from trioengine.actors.admission import Admission
from trioengine.actors.gate import Gate
from trioengine.actors.generation import Generation
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.ledger import Ledger, Stand
from trioengine.core.messages import FinishReason
from trioengine.testing.mutants.mutant import Mutant, replaced, together

_REUSED_IDS = 4


def _reuse_ids(mint: Any) -> Any:
    def mutant(self: Gate) -> int:
        return int(mint(self)) % _REUSED_IDS + 1

    return mutant


def _forget_the_waiting(settle: Any) -> Any:
    def mutant(self: Ledger, stand: Stand, finish_reason: FinishReason) -> None:
        settle(self, stand, finish_reason)
        if stand is Stand.WAITING and finish_reason is FinishReason.ABORT:
            self.aborted -= 1

    return mutant


def _serve_nobody(serve: Any) -> Any:
    def mutant(self: WaitingLine) -> None:
        if len(self) != 1:  # the last one in the line is forgotten
            serve(self)

    return mutant


class _Locked:
    """One lock for all: taken to ask, and to leave. Whoever waits for a slot holds it, so that nobody can give one."""

    def __init__(self) -> None:
        self.locks: dict[Gate, trio.Lock] = {}

    def of(self, gate: Gate) -> trio.Lock:
        if gate not in self.locks:
            self.locks = {gate: trio.Lock()}
        return self.locks[gate]


_LOCKED = _Locked()


def _ask_under_the_lock(run: Any) -> Any:
    async def mutant(self: Admission) -> None:
        async with _LOCKED.of(self._gate):
            await run(self)

    return mutant


def _leave_under_the_lock(aexit: Any) -> Any:
    async def mutant(self: Generation, *exc: Any) -> None:
        async with _LOCKED.of(self._session._gate):
            await aexit(self, *exc)

    return mutant


GATE_MUTANTS = (
    Mutant("F5", "ids are used again", replaced(Gate, "mint", _reuse_ids)),
    Mutant(
        "F11",
        "who waits for a slot holds the lock that is needed to give one back",
        together(
            replaced(Admission, "run", _ask_under_the_lock), replaced(Generation, "__aexit__", _leave_under_the_lock)
        ),
    ),
    Mutant("F28", "an abort before the first token is not counted", replaced(Ledger, "settle", _forget_the_waiting)),
    Mutant("F35", "a slot is free, and nobody who waits is admitted", replaced(WaitingLine, "serve", _serve_nobody)),
)
