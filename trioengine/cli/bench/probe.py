"""From a client's leaving to its KV blocks being free again, as the server's own gauge shows it."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioengine.cli.bench.backend import Backend
from trioengine.cli.bench.departure import Departure, Moment
from trioengine.cli.bench.load import Job, take_sample
from trioengine.cli.bench.sample import End
from trioengine.cli.bench.server_metrics import KV_USAGE, RUNNING, WAITING, Scrape, ServerMetrics

POLL = 0.002  # seconds from one reading to the next
PATIENCE = 10.0  # seconds


async def blocks_free_latencies(backend: Backend, metrics: ServerMetrics, prompts: Sequence[str]) -> list[float]:
    """One client after the other leaves at its first piece of text: seconds until no blocks are in use any more.

    They include the reading of the gauge. Empty where the gauge is not there or other clients keep the server busy;
    where the blocks are not free within 10 s, the list ends with infinity.
    """
    latencies: list[float] = []
    if not await _until_idle(metrics):
        return latencies
    for prompt in prompts:
        sample = await take_sample(backend, Job(prompt, 0.0, Departure(Moment.IN_THE_MIDDLE)), trio.current_time())
        left = trio.current_time()
        if sample.end is not End.LEFT:
            continue  # its whole answer came in one piece
        if not await _until_idle(metrics):
            return [*latencies, float("inf")]
        latencies.append(trio.current_time() - left)
    return latencies


async def _until_idle(metrics: ServerMetrics) -> bool:
    """False where the server cannot say, or after PATIENCE."""
    with trio.move_on_after(PATIENCE):
        while (scrape := await metrics.read()) is not None and KV_USAGE in scrape.values:
            if _is_idle(scrape):
                return True
            await trio.sleep(POLL)
    return False


def _is_idle(scrape: Scrape) -> bool:
    return all(scrape.values.get(name, 0.0) == 0 for name in (KV_USAGE, RUNNING, WAITING))
