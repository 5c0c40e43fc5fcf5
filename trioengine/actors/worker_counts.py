"""What the worker counts, over all its incarnations: the counters of a dead one stay, as far as it told them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trioengine.core.messages import Audited, Tokens, WorkerStatistics


class Counters(NamedTuple):
    """Those that a worker begins at 0, and that only grow."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0


class WorkerCounts:
    """`latest` is what this incarnation said last, None until it has said something."""

    def __init__(self) -> None:
        self.latest: WorkerStatistics | None = None
        self.prompt_tokens = 0  # of the requests that got a token
        self.generation_tokens = 0
        self._lost = Counters()  # those of the incarnations that are gone

    @property
    def counters(self) -> Counters:
        """The sums over all incarnations."""
        if self.latest is None:
            return self._lost
        latest = self.latest
        now = (
            latest.num_preemptions,
            latest.prefix_cache_queries,
            latest.prefix_cache_hits,
            latest.encoder_cache_queries,
            latest.encoder_cache_hits,
        )
        return Counters(*map(sum, zip(self._lost, now, strict=True)))

    def on_tokens(self, message: Tokens) -> int:
        """Take a step in; returns how many tokens it computed, 0 if these are rows of no step, or of one known."""
        before = 0 if self.latest is None else self.latest.num_tokens
        self.latest = message.statistics
        for row in message.rows:
            num_tokens = len(row.token_ids)
            self.generation_tokens += num_tokens
            if row.usage is not None and row.usage.completion_tokens == num_tokens > 0:  # its first row
                self.prompt_tokens += row.usage.prompt_tokens
        return self.latest.num_tokens - before

    def on_statistics(self, statistics: WorkerStatistics) -> None:
        self.latest = statistics

    def on_audited(self, message: Audited) -> None:
        """Its blocks, as they are now."""
        if self.latest is not None:
            free, cached = message.kv_blocks_free, message.kv_blocks_cached
            self.latest = replace(self.latest, kv_blocks_free=free, kv_blocks_cached=cached)

    def on_worker_lost(self) -> None:
        self._lost = self.counters
        self.latest = None
