"""An engine for the blocking calls, on a simulated worker."""

import gc
import signal
from contextlib import asynccontextmanager

import pytest
import trio

from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour

STEP = 0.001  # seconds: the clock is real here


@asynccontextmanager
async def simulated(config=None, **options):
    async with simulated_engine(config, behaviours=[Behaviour(step_time=STEP)], **options) as (engine, _):
        yield engine


async def everything_is_given_back(engine):
    gc.collect()
    with trio.fail_after(20):
        while engine.statistics().sessions:
            await engine.runtime.gate.changed()
    await engine.check_invariants()


async def somebody_waits(line):
    with trio.fail_after(20):
        while not len(line):
            await trio.lowlevel.checkpoint()


def interrupted(generation, after=1):
    """Read so many chunks; then comes Ctrl-C."""
    chunks = []
    with pytest.raises(KeyboardInterrupt):
        for chunk in generation:
            chunks.append(chunk)
            if len(chunks) == after:
                signal.raise_signal(signal.SIGINT)
    return chunks
