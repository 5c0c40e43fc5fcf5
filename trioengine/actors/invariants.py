"""The clauses of `check_invariants()`: the engine's books against each other, and against what the worker holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.core.errors import InvariantError
from trioengine.core.ledger import Ledger
from trioengine.core.messages import Audited

if TYPE_CHECKING:
    from trioengine.actors.sessions import Sessions


def check_books(ledger: Ledger, sessions: Sessions) -> None:
    """The counters agree with the sessions themselves."""
    if ledger.sessions != len(sessions):
        raise InvariantError(f"{ledger.sessions} session slots are taken, by {len(sessions)} sessions")
    in_flight = sum(session.generation is not None for session in sessions)
    if ledger.in_flight != in_flight:
        raise InvariantError(f"{ledger.in_flight} requests are counted in flight, sessions hold {in_flight}")


def check_audit(answer: Audited, expected: frozenset[int], attached: frozenset[int]) -> None:
    """The worker holds exactly the attached sessions, and every block is free, cached or held."""
    if expected != attached:
        raise InvariantError(f"the link knows sessions {_show(expected)}, the engine has attached {_show(attached)}")
    worker = frozenset(answer.sessions)
    if worker != expected:
        raise InvariantError(
            f"the worker holds sessions {_show(worker - expected)} that nobody has, "
            f"and lacks {_show(expected - worker)}"
        )
    blocks = answer.kv_blocks_free + answer.kv_blocks_cached + answer.kv_blocks_held
    if blocks != answer.kv_blocks_total:
        raise InvariantError(f"{blocks} KV blocks are accounted for, of {answer.kv_blocks_total}")
    if not answer.requests and answer.kv_blocks_held:
        raise InvariantError(f"{answer.kv_blocks_held} KV blocks are held though no request is there")


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
