"""Print the time that a step takes beside the model, with and without requests that wait.

Usage: python tests/worker/schedule_times.py [RUNNING [WAITING…]], with the root in PYTHONPATH. The core schedules a
step, takes its tokens, and makes the messages. The model is left out: each sequence gets the same token. Where requests
wait, about one sequence a step ends, and a waiting one begins.
"""

import statistics
import sys
import time

from trioengine.core.messages import AddMessage, AddSession
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import Limits

PROMPT, STEPS = 128, 300  # tokens of a prompt; steps that are measured


class Runner:
    """Samples one token for each sequence, and measures the time in which it does."""

    def __init__(self):
        self.seconds = 0.0

    def execute(self, output):
        began = time.perf_counter()
        sampled = [entry.sequence.row(7) for entry in output.scheduled if entry.samples]
        self.seconds += time.perf_counter() - began
        return sampled


def steps(running, waiting):
    """The seconds of each step, without the runner's."""
    runner = Runner()
    limits = Limits(49_152, max_model_len=2048, kv_blocks_total=40_000, block_size=16, max_num_seqs=running)
    core = EngineCore(runner, limits, time.monotonic)
    for number in range(running + waiting):
        length = number % running + 64 if waiting else 2 * STEPS
        answer = ResolvedParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        core.handle(AddSession(number))
        core.handle(AddMessage(number, number, 0, token_ids([number + 100] * PROMPT), answer, ()))
    while core.statistics().num_running < running:
        core.step()
    for _ in range(STEPS):
        if not core.has_work:
            sys.exit(f"all requests ended within {STEPS} steps: more have to wait")
        runner.seconds, began = 0.0, time.perf_counter()
        core.step()
        yield time.perf_counter() - began - runner.seconds


def main(running=128, *waiting):
    for count in waiting or (0, 2000):
        found = sorted(steps(running, count))
        print(
            f"{running} running, {count:5} waiting: median {1e3 * statistics.median(found):.2f} ms, "
            f"99 % below {1e3 * found[int(0.99 * len(found))]:.2f} ms"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
