"""The engine's counts, as its users see them."""

from __future__ import annotations

from dataclasses import dataclass

from trioengine.core.lifecycle import Power


@dataclass(frozen=True, slots=True)
class Statistics:
    """The engine's counts. received = finished + aborted + failed + preparing + waiting + running, at all times."""

    sessions: int
    preparing: int
    waiting: int
    running: int
    received: int
    finished: int
    aborted: int
    failed: int
    rejected: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    worker_sessions: int
    worker_pid: int | None
    incarnation: int
    power: Power
