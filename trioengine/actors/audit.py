"""The auditor: asks the worker for its sessions and blocks, and compares the answer with the engine's books.

Frames are FIFO and only frames change the worker's sessions, so the answer to an AUDIT is compared with the sessions
that were attached in the step that posted it, under any load.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import trio

from trioengine.actors.gate import Gate
from trioengine.actors.link import Link
from trioengine.actors.payload import PayloadBudget
from trioengine.actors.sessions import Sessions
from trioengine.core.errors import EngineClosed, EngineOverloaded, InvariantError, WorkerLost
from trioengine.core.ledger import Ledger
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Audit, Audited


@dataclass(slots=True)
class _Pending:
    """An AUDIT on its way."""

    link: Link
    payloads: frozenset[int]  # handed over before it, and, when it is answered, not consumed
    answered: trio.Event = field(default_factory=trio.Event)
    answer: Audited | None = None
    lost: WorkerLost | None = None


class Auditor:
    """The audits of one engine."""

    def __init__(self, gate: Gate, sessions: Sessions, payloads: PayloadBudget) -> None:
        self._gate = gate
        self._sessions = sessions
        self._payloads = payloads
        self._pending: dict[int, _Pending] = {}

    async def check(self, timeout: float) -> None:
        """Verify the engine's own books and, if there is a worker, its report; raises as `Engine.check_invariants`."""
        self._gate.check()
        check_books(self._gate.ledger, self._sessions)
        self._payloads.check()
        link, power = self._gate.link, self._gate.power
        if power is Power.CLOSED:
            raise EngineClosed("the engine is closed")
        if link is None and power is Power.ASLEEP:
            return  # whatever worker there is holds nothing
        if link is None:
            raise EngineOverloaded("there is no worker to ask", code=power.value)
        if power in (Power.WAKING, Power.UPDATING):
            raise EngineOverloaded("the worker may be loading weights", code=power.value)
        await self._audit(link, self._gate.mint(), self._sessions.attached, timeout)

    async def _audit(self, link: Link, audit_id: int, attached: frozenset[int], timeout: float) -> None:
        """Ask on `link`, where the sessions `attached` were added and END_SESSION was not posted.

        Raises InvariantError when anything else comes back, or nothing within `timeout` seconds; WorkerLost when the
        worker dies meanwhile.
        """
        known = link.connection.open_sessions
        link.post(Audit(audit_id))
        audit = self._pending[audit_id] = _Pending(link, link.payloads)
        try:
            with trio.move_on_after(timeout):
                await audit.answered.wait()
        finally:
            del self._pending[audit_id]
        if audit.lost is not None:
            raise copy(audit.lost)
        if audit.answer is None:
            raise InvariantError(f"the worker did not answer an audit within {timeout:g} s")
        check_audit(audit.answer, known, attached)
        check_payloads(audit.answer, audit.payloads)

    def on_audited(self, answer: Audited) -> None:
        """AUDITED; the one who asked may have gone."""
        if (audit := self._pending.get(answer.audit)) is not None:
            audit.answer, audit.payloads = answer, audit.payloads & audit.link.payloads
            audit.answered.set()

    def on_worker_lost(self, error: WorkerLost) -> None:
        """The incarnation is dead: nothing will be answered."""
        for audit in self._pending.values():
            audit.lost = error
            audit.answered.set()


def check_books(ledger: Ledger, sessions: Sessions) -> None:
    """The counters agree with the sessions themselves."""
    if ledger.sessions != len(sessions):
        raise InvariantError(f"{ledger.sessions} session slots are taken, by {len(sessions)} sessions")
    in_flight = sum(session.request is not None for session in sessions)
    if ledger.in_flight != in_flight:
        raise InvariantError(f"{ledger.in_flight} requests are counted in flight, sessions hold {in_flight}")


def check_audit(answer: Audited, expected: frozenset[int], attached: frozenset[int]) -> None:
    """The worker holds exactly the attached sessions; every block and state slot is free, kept or held."""
    if expected != attached:
        raise InvariantError(f"the link knows sessions {_show(expected)}, the engine has attached {_show(attached)}")
    worker = frozenset(answer.sessions)
    if worker != expected:
        raise InvariantError(
            f"the worker holds sessions {_show(worker - expected)} that the engine lacks, "
            f"and lacks {_show(expected - worker)}"
        )
    blocks = answer.kv_blocks_free + answer.kv_blocks_cached + answer.kv_blocks_held
    if blocks != answer.kv_blocks_total:
        raise InvariantError(f"{blocks} KV blocks are accounted for, of {answer.kv_blocks_total}")
    if not answer.requests and answer.kv_blocks_held:
        raise InvariantError(f"{answer.kv_blocks_held} KV blocks are held though no request is there")
    blocks = answer.window_blocks_free + answer.window_blocks_cached + answer.window_blocks_held
    if blocks != answer.window_blocks_total:
        raise InvariantError(f"{blocks} blocks of windows are accounted for, of {answer.window_blocks_total}")
    if not answer.requests and answer.window_blocks_held:
        raise InvariantError(f"{answer.window_blocks_held} blocks of windows are held though no request is there")
    slots = answer.state_slots_free + answer.state_slots_kept + answer.state_slots_held
    if slots != max(0, answer.state_slots_total - 1):
        raise InvariantError(
            f"{slots} state slots are accounted for, and one for padding, of {answer.state_slots_total}"
        )
    if not answer.requests and answer.state_slots_held:
        raise InvariantError(f"{answer.state_slots_held} state slots are held though no request is there")


def check_payloads(answer: Audited, expected: frozenset[int]) -> None:
    """The worker has yet to consume exactly these payloads.

    `expected` were handed over before the AUDIT, and not consumed when it was answered.
    """
    worker = frozenset(answer.payloads)
    if worker != expected:
        raise InvariantError(
            f"the worker has yet to consume payloads {_show(worker - expected)} that it was not given, "
            f"and lacks {_show(expected - worker)}"
        )


def _show(ids: frozenset[int]) -> str:
    return "{" + ", ".join(map(str, sorted(ids))) + "}"
