"""Measure the parts of a decoding step behind a long context, and the rate at which it reads weights, keys and values.

Usage, with the root in PYTHONPATH: python tests/worker/context_steps.py MODEL [CONTEXT] [STEPS]

The context's keys and values are ones, in neighbouring blocks. The same token is decoded over and over, without a
profile for the time of a step, and with one for its parts. Before each step memory is read in its order, because its
rate changes from second to second on some hosts: steps are grouped by the rate before and after them, in tens of GB/s.
"""

import ctypes
import statistics
import sys
import time
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.power import ALL_TAGS
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.huge_pages import reserve
from trioengine.worker.kernels.native_decoder import OPERATIONS
from trioengine.worker.kernels.products import Profile, ProfiledPart
from trioengine.worker.roof import load_roof
from trioengine.worker.runner.loaded_model import LoadedModel
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.runner.model_spec import ModelSpec

MEMORY = 128 << 20  # bytes
LEAST = 10  # steps of a state


def make_step(context: int, block_size: int) -> ForwardBatch:
    """The last token of one sequence with the first blocks."""
    last, row = torch.tensor([context - 1]), torch.zeros(1, dtype=torch.int64)
    blocks = np.arange(-(-context // block_size))[None]
    return ForwardBatch(row, last, last, row, blocks, np.ones(1, int), np.full(1, context), 1, block_size)


def main(path: str, context: int = 7950, steps: int = 300) -> None:
    spec = ModelSpec.read(WorkerConfig(model_path=path, max_model_len=context + 1))
    runner = TorchModelRunner(LoadedModel(spec, lambda done, total: None))
    runner.wake(ALL_TAGS)
    for layer in runner.cache.layers:
        layer[:, : -(-context // spec.layout.block_size)] = 1
    products, native = spec.kernels.products, load_roof()
    memory = reserve(MEMORY).fill_(1)
    batch = make_step(context, spec.layout.block_size)
    measured = []
    for profile in chain.from_iterable((None, Profile()) for _ in range(steps)):
        began = time.perf_counter()
        native.read(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(MEMORY // 4))
        rate = MEMORY / (time.perf_counter() - began) / 1e9
        products.profile = profile
        with torch.inference_mode():
            began = time.perf_counter()
            attention = spec.kernels.attention(batch, runner.cache)
            runner.model.compute(batch, attention, runner.states)
        measured.append(Measured(rate, time.perf_counter() - began, None if profile is None else profile.parts))
    cache = len(runner.cache.layers) * context * spec.layout.token_bytes
    same = [step for step, behind in pairwise(measured) if state_of(step) == state_of(behind)]
    for state in sorted({state_of(step) for step in same}):
        report([step for step in same if state_of(step) == state], cache)
    print(f"{len(measured) - len(same)} of {len(measured)} steps had another rate after them")


class Measured(NamedTuple):
    """A step, and the rate of memory before it, in GB/s."""

    memory: float
    seconds: float
    parts: dict[str, ProfiledPart] | None  # None: it had no profile


def state_of(step: Measured) -> int:
    """The state of the host's memory: its rate, in tens of GB/s."""
    return round(step.memory / 10)


def report(measured: list[Measured], cache: int) -> None:
    """Print medians of these steps, which have one rate of memory; `cache`: bytes of keys and values."""
    plain, parts = ([step for step in measured if (step.parts is None) is each] for each in (True, False))
    if min(len(plain), len(parts)) < LEAST:
        print(f"{len(measured)} steps with memory at about {10 * state_of(measured[0])} GB/s are too few")
        return
    weights = sum(part.weight_bytes for part in parts[0].parts.values())
    seconds, memory = (statistics.median(getattr(each, name) for each in plain) for name in ("seconds", "memory"))
    share = statistics.median((weights + cache) / each.seconds / each.memory / 1e9 for each in plain)
    print(f"{len(plain)} steps with memory at {memory:.1f} GB/s: {1e3 * seconds:.2f} ms, "
          f"{(weights + cache) / seconds / 1e9:.1f} GB/s, {share:.0%} "
          f"({weights / 1e6:.0f} MB of weights, {cache / 1e6:.0f} MB of keys and values)")  # fmt: skip
    for name in OPERATIONS:
        if name in parts[0].parts:
            median = statistics.median(each.parts[name].seconds for each in parts)
            size = cache if name == "attention" else parts[0].parts[name].weight_bytes
            print(f"  {name}: {1e3 * median:.2f} ms" + (f", {size / median / 1e9:.1f} GB/s" if size else ""))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
