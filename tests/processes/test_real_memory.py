"""The memory of a sleeping worker's process, after any computation."""

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from trioengine import EngineConfig, SamplingParams, open_engine

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
MIB = 1 << 20
CYCLES = 10
ONE = SamplingParams(max_tokens=1, temperature=0)
BARE = """
import torch
import trioengine.worker.runner.model_runner
ones = torch.ones(64, 64, dtype=torch.bfloat16)
ones.mm(ones)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:")))
"""


@pytest.fixture
def config(smollm2):
    return EngineConfig(model=str(smollm2), dtype="bfloat16", kv_cache_memory=64 * MIB, max_model_len=512)


@pytest.fixture(scope="module")
def bare():
    """Bytes of a worker that has no model and has made one product."""
    printed = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True).stdout
    return int(printed) << 10


def rss(engine):
    """Bytes of the worker."""
    status = Path(f"/proc/{engine.statistics().worker_pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))


async def asleep(engine, level):
    """Bytes of a worker that sleeps; at level 2 of the fresh one, when it is there."""
    await engine.sleep(level)
    while engine.runtime.gate.link is None:
        await engine.runtime.gate.changed()
    return rss(engine)


async def test_level_two_leaves_no_more_than_a_worker_without_a_model(config, bare):
    """Also after prompts of many lengths, for each of which the libraries keep kernels that no call gives back."""
    weights = (await trio.Path(config.model).stat()).st_size
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine:
            for length in range(5, 65, 2):
                await engine.generate([1000 + length] * length, ONE)
            assert rss(engine) > bare + weights
            for _ in range(2):
                assert await asleep(engine, 2) < 1.15 * bare
                await engine.wake()
                await engine.generate([1000, 1001], ONE)


@pytest.mark.parametrize("level", [1, 2])
async def test_nights_do_not_add_up(config, level):
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine:
            sizes = []
            for _ in range(CYCLES + 1):
                await engine.generate([1000] * 40, ONE)
                sizes.append(await asleep(engine, level))
                await engine.wake()
            assert sizes[-1] < sizes[0] + 5 * MIB, [size // MIB for size in sizes]
