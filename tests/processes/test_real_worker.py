"""The real worker, as a process: killed, stopped, orphaned, fed with bad models."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from trioengine import EngineConfig, EngineOverloaded, ModelError, SamplingParams, SessionBusy, WorkerLost, open_engine
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause, FinishReason

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
ORPHAN_PATIENCE = 60  # for what takes milliseconds
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def config(smollm2):
    return EngineConfig(
        model=str(smollm2),
        kv_cache_memory=64 << 20,
        max_model_len=1024,
        unresponsive_timeout=2.0,
        ping_interval=0.2,
        on_worker_loss="fail",
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
            await engine.runtime.gate.changed()
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


async def test_ready_after_a_kill_is_the_next_workers(in_time, config):
    async with open_engine(replace(config, kv_cache_dtype="int8")) as engine:
        before = await engine.generate("hello", SHORT)
        os.kill(engine.statistics().worker_pid, signal.SIGKILL)
        await engine.ready()
        assert engine.statistics().incarnation == 2
        assert engine.limits.kv_cache_dtype == "int8"
        assert (await engine.generate("hello", SHORT)).token_ids == before.token_ids


ROUNDS = 200
WAYS = ("cancel", "leave", "abort twice", "end twice", "exception", "two tasks", "last token", "stay")


class Oops(Exception):
    """What a caller's body raises."""


async def leave(engine, number):
    """Use a session in one of the ways to leave it, after as many tokens as the number says."""
    way, tokens = WAYS[number % len(WAYS)], number // len(WAYS) % 5
    params = SamplingParams(
        max_tokens=tokens + 1 if way in ("last token", "stay") else 400, ignore_eos=True, seed=number
    )
    with trio.CancelScope() as scope, contextlib.suppress(Oops):
        async with engine.open_session(wait=True) as session:
            generation = session.generate(f"Question {number}?", params, wait=True)
            if way == "cancel" and tokens == 0:
                scope.cancel()  # while it is prepared
            async with generation:
                await some_tokens(generation, tokens)
                if way == "cancel" or way == "last token":
                    scope.cancel()
                elif way == "abort twice":
                    generation.abort()
                    generation.abort()
                    assert (await generation.result()).finish_reason is FinishReason.ABORT
                elif way == "end twice":
                    session.end()
                    session.end()
                elif way == "exception":
                    raise Oops
                elif way == "two tasks":
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(ask_a_busy, session)
                elif way == "stay":
                    assert len((await generation.result()).token_ids) == tokens + 1
                await trio.lowlevel.checkpoint()
    with trio.CancelScope(shield=True):
        await session.ended()
    assert generation.outcome is not None


async def some_tokens(generation, count):
    seen = 0
    while seen < count:
        seen += len((await anext(generation)).token_ids)


async def ask_a_busy(session):
    with pytest.raises(SessionBusy):
        await session.generate("And I?", SHORT).__aenter__()


async def test_two_hundred_callers_leave_in_every_way_under_load(in_time, config):
    """Nothing else is disturbed; then the worker holds nothing, the books balance, tasks and descriptors are back."""
    async with open_engine(config) as engine:
        async with engine.open_session() as session, session.generate("Hello.", SHORT) as generation:
            await generation.result()
        await session.ended()
        before, tasks = descriptors(), trio.lowlevel.current_statistics().tasks_living
        slots, left = trio.CapacityLimiter(12), []

        async def caller(number):
            async with slots:
                await leave(engine, number)
                left.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(ROUNDS):
                nursery.start_soon(caller, number)
            while len(left) < ROUNDS:
                answer = await engine.generate("Count.", SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
                assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 20
                await engine.check_invariants()
        while engine.statistics().sessions:
            await engine.runtime.gate.changed()
        await engine.check_invariants()
        statistics = engine.statistics()
        assert statistics.worker_sessions == statistics.running == statistics.waiting == statistics.preparing == 0
        assert statistics.received == statistics.finished + statistics.aborted + statistics.failed
        assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total
        assert descriptors() == before
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks


ORPHAN = """
    import os, sys, time, trio
    from trioengine import EngineConfig, SamplingParams, open_engine

    async def main():
        async with open_engine(EngineConfig(model=sys.argv[1], kv_cache_memory=64 << 20)) as engine:
            if sys.argv[2] == "fork":
                if os.fork() == 0:  # a child that knows nothing of us, and holds every descriptor
                    time.sleep(600)  # it is killed before
                    os._exit(0)
            async with engine.open_session() as session:
                async with session.generate("Count.", SamplingParams(max_tokens=2000, ignore_eos=True)) as generation:
                    async for _ in generation:
                        print(engine.statistics().worker_pid, flush=True)

    trio.run(main)
"""


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_no_worker_outlives_its_parent(smollm2, forks):
    """Its fork holds the pipes for longer than we wait here: then it is not their end that tells the worker."""
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
            readable, _, _ = select.select([pidfd], [], [], ORPHAN_PATIENCE)
            os.close(pidfd)
            assert readable, "the worker is still there"
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # its child, too


IDLE = """
    import sys, trio
    from pathlib import Path
    from trioengine import EngineConfig, SamplingParams, open_engine

    async def main():
        async with open_engine(EngineConfig(model=sys.argv[1], kv_cache_memory=64 << 20)) as engine:
            await engine.generate("Hello.", SamplingParams(max_tokens=4))
            print(Path("/proc/self/status").read_text())
            print("modules:", *sys.modules)

    trio.run(main)
"""


def test_an_idle_engine_is_light(smollm2):
    """One engine with its model's tokenizer, in a process that does nothing else."""
    command = [sys.executable, "-c", textwrap.dedent(IDLE), str(smollm2)]
    said = dict(line.split(":", 1) for line in subprocess.check_output(command, text=True).splitlines() if line)
    assert not {"torch", "numpy", "gguf"} & set(said["modules"].split())
    assert int(said["VmRSS"].split()[0]) < 90_000  # kB


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
    """The worker's process and loop load no trio and no torch, the others no more than they need."""
    for module, forbidden in [
        ("trioengine.worker.process", ("trio", "torch", "numpy")),
        ("trioengine.actors.engine", ("torch", "gguf", "numpy")),
        ("trioengine.serve", ("torch", "numpy", "rich", "matplotlib")),
        ("trioengine.cli.serve", ("torch", "rich", "matplotlib")),
        ("trioengine.client.client", ("torch", "tokenizers", "prometheus_client")),
        ("trioengine.cli", ("torch", "trio")),
    ]:
        program = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
        loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert loaded.stdout.strip() == "", f"import {module} loads {loaded.stdout}"


async def test_a_model_drafts_for_itself(in_time, config):
    """Drafts are kept, and the answers are those without; so after a death."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    async with open_engine(config) as engine:
        plain = await engine.generate("Tell me a story.", params)
    drafting = replace(config, draft_model=config.model, num_speculative_tokens=4, on_worker_loss="resume")
    async with open_engine(drafting) as engine:
        for _ in range(2):
            assert (await engine.generate("Tell me a story.", params)).token_ids == plain.token_ids
            statistics = engine.statistics()
            assert statistics.draft_tokens >= statistics.accepted_tokens > 20
            os.kill(statistics.worker_pid, signal.SIGKILL)
            await engine.ready()
