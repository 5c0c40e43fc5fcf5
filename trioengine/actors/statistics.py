"""The engine's counts, as its users see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trioengine.actors.gate import Gate
from trioengine.actors.payload import PayloadBudget
from trioengine.actors.supervisor import Supervisor
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Audited, Ready, WorkerStatistics
from trioengine.core.types import Cause, FinishReason


@dataclass(frozen=True, slots=True)
class Statistics:
    """The engine's counts. received = finished + aborted + failed + preparing + waiting + running + suspended, always.

    Counters never go down, also when the worker is restarted. A session that was left is in `sessions`, and may be in
    `worker_sessions`, until the worker has answered END_SESSION: then its slot is free.
    """

    sessions: int
    waiting_for_slot: int  # callers that wait for a session's or a request's; their requests are not received yet
    preparing: int
    waiting: int
    running: int
    suspended: int
    received: int
    finished: int
    aborted: int
    failed: int
    rejected: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    state_slots_total: int  # of a model with states beside keys and values, without the one for padding; else 0
    state_slots_free: int
    state_slots_kept: int  # for the prefix cache
    window_blocks_total: int  # of layers with windows that have blocks of their own; else 0
    window_blocks_free: int
    window_blocks_cached: int
    payload_bytes_inflight: int  # of images that are prepared, on their way to the worker, or of a suspended request
    payload_bytes_kept: int  # of images that are kept for later turns
    worker_sessions: int
    worker_pid: int | None
    incarnation: int
    restarts: int  # workers that were started in place of one that was lost
    power: Power
    prompt_tokens: int  # of the requests that got a token
    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    encoder_cache_queries: int  # images looked up
    encoder_cache_hits: int  # images whose features were there
    draft_tokens: int  # drafted by speculation, and verified
    accepted_tokens: int  # drafted tokens that became part of answers
    finish_reasons: Mapping[FinishReason, int] = field(repr=False)  # of all that finished, aborted or failed
    abort_causes: Mapping[Cause, int] = field(repr=False)  # of all that aborted


def statistics_of(
    gate: Gate, supervisor: Supervisor, payloads: PayloadBudget, worker: WorkerCounts, ready: Ready | None
) -> Statistics:
    """The counts at this moment; the worker's as it reported them last."""
    ledger, latest, current = gate.ledger, worker.latest, supervisor.current
    num_blocks = ready.kv_blocks_total if ready is not None else 0
    num_slots = max(0, ready.state_slots - 1) if ready is not None else 0
    in_windows = ready.window_blocks_total if ready is not None else 0
    return Statistics(
        sessions=ledger.sessions,
        waiting_for_slot=gate.num_waiting_for_slot,
        preparing=ledger.preparing,
        waiting=ledger.waiting,
        running=ledger.running,
        suspended=ledger.suspended,
        received=ledger.received,
        finished=ledger.finished,
        aborted=ledger.aborted,
        failed=ledger.failed,
        rejected=ledger.rejected,
        kv_blocks_total=num_blocks,
        kv_blocks_free=latest.kv_blocks_free if latest is not None else num_blocks,
        kv_blocks_cached=latest.kv_blocks_cached if latest is not None else 0,
        state_slots_total=num_slots,
        state_slots_free=latest.state_slots_free if latest is not None else num_slots,
        state_slots_kept=latest.state_slots_kept if latest is not None else 0,
        window_blocks_total=in_windows,
        window_blocks_free=latest.window_blocks_free if latest is not None else in_windows,
        window_blocks_cached=latest.window_blocks_cached if latest is not None else 0,
        payload_bytes_inflight=payloads.bytes_in_flight,
        payload_bytes_kept=payloads.bytes_kept,
        worker_sessions=len(current.link.connection.sessions) if current is not None else 0,
        worker_pid=current.process.pid if current is not None else None,
        incarnation=supervisor.incarnations,
        restarts=supervisor.restarts,
        power=gate.power,
        **worker.counters._asdict(),
        finish_reasons=dict(ledger.finish_reasons),
        abort_causes=dict(ledger.abort_causes),
    )


class Counters(NamedTuple):
    """The counters that a worker begins at 0, and that only grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class WorkerCounts:
    """The counts of all workers; `latest` is the last report of this incarnation, None before it."""

    def __init__(self) -> None:
        self.latest: WorkerStatistics | None = None
        self._lost = Counters()  # of the incarnations that are gone

    @property
    def counters(self) -> Counters:
        """The sums over all incarnations."""
        if self.latest is None:
            return self._lost
        latest = self.latest
        now = (
            latest.prompt_tokens,
            latest.generation_tokens,
            latest.num_preemptions,
            latest.prefix_cache_queries,
            latest.prefix_cache_hits,
            latest.encoder_cache_queries,
            latest.encoder_cache_hits,
            latest.draft_tokens,
            latest.accepted_tokens,
        )
        return Counters(*map(sum, zip(self._lost, now, strict=True)))

    def on_audited(self, message: Audited) -> None:
        """Its blocks and state slots, as they are now."""
        if self.latest is not None:
            self.latest = replace(
                self.latest,
                kv_blocks_free=message.kv_blocks_free,
                kv_blocks_cached=message.kv_blocks_cached,
                state_slots_free=message.state_slots_free,
                state_slots_kept=message.state_slots_kept,
                window_blocks_free=message.window_blocks_free,
                window_blocks_cached=message.window_blocks_cached,
            )

    def on_worker_lost(self) -> None:
        self._lost = self.counters
        self.latest = None
