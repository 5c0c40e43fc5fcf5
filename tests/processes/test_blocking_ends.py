"""How engines and sessions with blocking calls end: closed, dropped, failed, or never begun."""

import gc
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers.blocking_engines import everything_is_given_back, simulated, somebody_waits

from trioengine import (
    EngineClosed,
    EngineConfig,
    ModelError,
    WorkerLost,
    blocking,
)
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour


def test_a_session_that_is_not_referenced_ends(engine):
    for chunk in engine.open_session().generate("one", max_tokens=3, ignore_eos=True):
        assert chunk.text
    engine.loop.call(everything_is_given_back, engine.loop.resource)


def test_an_engine_that_is_closed_refuses():
    engine = blocking.Engine(simulated)
    session = engine.open_session()
    generation = session.generate("one")
    engine.close()
    engine.close()
    for call in (lambda: session.ask("one"), lambda: engine.generate("one"), generation.result, engine.open_session):
        with pytest.raises(EngineClosed):
            call()
    session.close()


def test_closing_ends_a_call_in_another_thread():
    engine = blocking.Engine(simulated)
    engine.sleep()
    ended = []

    def ask():
        try:
            engine.generate("one", wait=True)
        except EngineClosed as exc:
            ended.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    engine.loop.call(somebody_waits, engine.loop.resource.runtime.gate.sessions)
    engine.close()
    thread.join()
    assert len(ended) == 1


def test_an_engine_that_is_not_referenced_is_closed():
    engine = blocking.Engine(simulated)
    thread = engine.loop._thread
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_an_engine_that_cannot_start():
    before = set(threading.enumerate())
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        blocking.open_engine("toy", max_model_length=3)
    with pytest.raises(ModelError, match="no-such-model"):
        blocking.open_engine("/no-such-model.gguf")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert "trioengine" not in left  # trio keeps idle threads of its own for a while


def test_an_engine_whose_worker_cannot_be_kept():
    """Calls raise the failure that ended it."""

    @asynccontextmanager
    async def failing():
        config = EngineConfig(model="toy", max_restarts=1, restart_delays=[0])
        async with simulated_engine(config, behaviours=[Behaviour()]) as (engine, simulation):
            engine.simulation = simulation
            yield engine

    failed = blocking.Engine(failing)
    simulation = failed.loop.resource.simulation

    def break_it():
        simulation.failing_starts = 100
        simulation.worker.kill()

    failed.loop.call_sync(break_it)
    with pytest.raises(WorkerLost):
        failed.generate("one", wait=True)
    failed.close()


def test_a_call_between_the_failure_and_the_end_of_the_loop(engine):
    async def refused():
        raise EngineClosed("the engine is closed") from WorkerLost("the worker died ten times")

    with pytest.raises(WorkerLost, match="ten times"):
        engine.loop.call(refused)


PROGRAM = """
import os, sys
from pathlib import Path
from trioengine import blocking

engine = blocking.open_engine(sys.argv[1], kv_cache_memory=64 << 20, max_model_len=512)
session = engine.open_session()
for chunk in session.generate("Count to ten.", max_tokens=200, ignore_eos=True):
    break
print(engine.statistics().worker_pid)
"""


def test_a_program_that_closes_nothing_leaves_no_worker(smollm2):
    command = [sys.executable, "-c", PROGRAM, str(smollm2)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not Path(f"/proc/{int(ended.stdout)}").exists()
