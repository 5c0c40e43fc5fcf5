"""`trioengine serve` as a task: its log, and its end."""

import gc
import logging
import signal
import weakref
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import trio
import trio.testing

from trioengine import EngineConfig
from trioengine.cli.serve import COLLECT_AFTER, _serve
from trioengine.core.errors import InvalidConfig
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "trioengine")
    return caplog


@pytest.fixture(autouse=True)
def thawed():
    """What a server does to the garbage collector is undone for the tests that follow."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


@asynccontextmanager
async def served(log, max_model_len=None, limits=DEFAULT_LIMITS, **behaviour):
    """A server until SIGTERM, which comes after the body; the simulation that it runs on."""
    async with trio.open_nursery() as workers:
        simulation = Simulation(workers, limits=limits, behaviours=[Behaviour(**behaviour)])
        config = EngineConfig(model="toy", max_model_len=max_model_len)
        serving = partial(serve, config, ServeConfig(port=0), ports=simulation.ports)
        with trio.fail_after(100):  # the simulated worker's task may take longer
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_serve, serving, 30.0, nullcontext())
                while "listening on" not in log.text:
                    await trio.lowlevel.checkpoint()
                yield simulation
                signal.raise_signal(signal.SIGTERM)


async def said(log, text, times=1):
    while log.text.count(text) < times:  # noqa: ASYNC110 - there is no event for it
        await trio.sleep(0.1)  # simulated


async def test_a_signal_before_it_is_ready_is_a_clean_end(autojump_clock, log):
    async with served(log, load_time=1000):
        pass
    assert "ready: " not in log.text
    assert log.messages[-1] == "stopped"


async def test_a_worker_that_is_ready_again_is_told(autojump_clock, log):
    async with served(log) as simulation:
        await said(log, "ready: toy on cpu")
        simulation.worker.exit(9)
        await said(log, "ready: toy on cpu", 2)
        assert len(simulation.workers) == 2
    assert log.messages[-1] == "stopped"


@pytest.mark.parametrize(("asked", "is_told"), [(512, True), (65, True), (64, False), (None, False)])
async def test_a_kv_cache_that_is_shorter_than_the_context_asked_for_is_told(autojump_clock, log, asked, is_told):
    limits = replace(DEFAULT_LIMITS, kv_blocks_total=64 // DEFAULT_LIMITS.block_size)
    async with served(log, max_model_len=asked, limits=limits):
        await said(log, "ready: ")
    told = f"max_model_len is {asked}, but the KV cache holds 64 tokens; kv_cache_memory makes it larger"
    assert (told in log.messages) == is_told


@pytest.mark.parametrize("asked", [100_000, 513])
async def test_a_context_longer_than_the_models_is_refused(autojump_clock, asked):
    ports = Simulation(None).ports  # which starts no worker
    message = f"^max_model_len must be at most 512, the context of model 'toy', got {asked}$"
    with pytest.raises(InvalidConfig, match=message) as refused:
        await serve(EngineConfig(model="toy", max_model_len=asked), ServeConfig(port=0), ports=ports)
    assert refused.value.fields == ("max_model_len",)


class Cycle:
    def __init__(self):
        self.itself = self


async def test_what_is_there_when_it_is_ready_is_frozen_and_no_garbage(autojump_clock, log):
    gc.unfreeze()
    garbage = weakref.ref(Cycle())
    async with served(log):
        assert gc.get_freeze_count() == 0
        await said(log, "ready: toy on cpu")
        await trio.testing.wait_all_tasks_blocked()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == COLLECT_AFTER
        assert garbage() is None
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None


async def test_a_server_that_is_never_ready_is_not_frozen(autojump_clock, log):
    gc.unfreeze()
    async with served(log, load_time=1000):
        pass
    assert gc.get_freeze_count() == 0
