"""The real worker, as a process: killed, stopped, orphaned, fed with bad models."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio

from trioengine import EngineConfig, EngineOverloaded, FinishReason, ModelError, SamplingParams, WorkerLost, open_engine
from trioengine.core.lifecycle import Cause, Power

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def config(smollm2):
    return EngineConfig(
        model=str(smollm2), kv_cache_memory=64 << 20, max_model_len=1024, unresponsive_timeout=2.0, ping_interval=0.2
    )


@pytest.fixture
async def in_time():
    with trio.fail_after(PATIENCE):
        yield


def descriptors():
    return sorted(Path("/proc/self/fd").iterdir())


async def test_killed_at_any_moment_and_stopped(in_time, config):
    """Everyone is told, the history stays, the next request works; nothing is left behind."""
    before = None
    async with open_engine(config) as engine:
        async with engine.open_session() as session:
            async with session.generate("My name is Ada.", SHORT) as generation:
                first = await generation.result()
            for moment in ("idle", "posted", "streaming", "stopping", "stopped by SIGSTOP"):
                await strike(engine, session, moment)
                async with session.generate("Go on.", SHORT, wait=True) as generation:
                    answer = await generation.result()
                assert answer.finish_reason is FinishReason.LENGTH
                before = before or descriptors()
                assert descriptors() == before
            assert [turn["content"] for turn in session.history][:2] == ["My name is Ada.", first.text]
            assert len(session.history) == 12
        await session.ended()
        await engine.check_invariants()
        assert engine.statistics().incarnation == 6
        pid = engine.statistics().worker_pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def strike(engine, session, moment):
    pid = engine.statistics().worker_pid
    if moment == "idle":
        os.kill(pid, signal.SIGKILL)
        while engine.statistics().power is Power.AWAKE:
            await engine.gate.changed()
        with pytest.raises(EngineOverloaded, match="restarting"):
            await session.generate("x").__aenter__()
        return
    async with session.generate("Count.", LONG) as generation:
        if moment != "posted":
            await anext(generation)
        if moment == "stopping":
            generation.abort()
        os.kill(pid, signal.SIGSTOP if "SIGSTOP" in moment else signal.SIGKILL)
        if moment == "stopping":
            assert (await generation.result()).cause is Cause.CLIENT
        else:
            with pytest.raises(WorkerLost, match="no answer" if "SIGSTOP" in moment else "SIGKILL"):
                await generation.result()


async def test_cancelled_in_many_ways_under_load(in_time, config):
    """Callers leave while the real worker computes; then the worker holds nothing and the books balance."""
    async with open_engine(config) as engine:
        before = descriptors()

        async def caller(number):
            with trio.move_on_after(0.05 * (number % 9)):
                async with engine.open_session() as session:
                    async with session.generate(f"Question {number}?", LONG) as generation:
                        async for _ in generation:
                            if number % 4 == 0:
                                generation.abort()
                            elif number % 4 == 1:
                                session.end()

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(caller, number)
        while engine.statistics().sessions:
            await engine.gate.changed()
        await engine.check_invariants()
        statistics = engine.statistics()
        assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total
        assert descriptors() == before


ORPHAN = """
    import os, sys, time, trio
    from trioengine import EngineConfig, SamplingParams, open_engine

    async def main():
        async with open_engine(EngineConfig(model=sys.argv[1], kv_cache_memory=64 << 20)) as engine:
            if sys.argv[2] == "fork":
                if os.fork() == 0:  # a child that knows nothing of us, and holds every descriptor
                    time.sleep(60)
                    os._exit(0)
            async with engine.open_session() as session:
                async with session.generate("Count.", SamplingParams(max_tokens=2000, ignore_eos=True)) as generation:
                    async for _ in generation:
                        print(engine.statistics().worker_pid, flush=True)

    trio.run(main)
"""


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_no_worker_outlives_its_parent(smollm2, forks):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHAN), str(smollm2), forks],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            worker = int(parent.stdout.readline())
            pidfd = os.pidfd_open(worker)
            os.kill(parent.pid, signal.SIGKILL)
            readable, _, _ = select.select([pidfd], [], [], PATIENCE)
            os.close(pidfd)
            assert readable, "the worker is still there"
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.fixture
def truncated(smollm2, tmp_path):
    path = tmp_path / "truncated.gguf"
    path.write_bytes(smollm2.read_bytes()[: 50 << 20])
    return path


async def test_a_model_that_cannot_be_used(in_time, truncated, tmp_path):
    (tmp_path / "empty.gguf").touch()
    for model, why in [
        (truncated, r"truncated\.gguf.*truncated"),
        (tmp_path / "empty.gguf", r"empty\.gguf"),
        (tmp_path / "absent.gguf", r"absent\.gguf"),
        ("no-such-model", "no-such-model"),
    ]:
        with pytest.raises(ModelError, match=why):
            async with open_engine(EngineConfig(model=str(model))):
                pass


async def test_a_cache_that_is_too_small_is_the_models_fault_and_named(in_time, smollm2):
    with pytest.raises(ModelError, match="kv_cache_memory"):
        async with open_engine(EngineConfig(model=str(smollm2), kv_cache_memory=1)):
            pass


def test_cold_imports():
    """The worker's loop loads no trio, the engine's front no torch."""
    for module, forbidden in [
        ("trioengine.worker.loop", ("trio", "torch")),
        ("trioengine.actors.engine", ("torch", "gguf", "numpy")),
        ("trioengine.serve", ("torch",)),
        ("trioengine.cli", ("torch", "trio")),
    ]:
        program = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
        loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert loaded.stdout.strip() == "", f"import {module} loads {loaded.stdout}"
