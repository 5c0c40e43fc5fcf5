"""Compare the orders of tasks that the fuzzer may draw: how many passes each takes to find the mutants.

Usage: python tests/mutants/orders.py [--mutant ID]... [--seeds N] [--programs N]

`fifo`: the tasks of a pass go in the order of their start. `random`: as the fuzzer has it, each pass is a random
permutation after the rule `reorder`. `pct`: after that rule each task has a random priority, and the task that goes
first is demoted at a few random passes (Burckhardt et al., ASPLOS 2010). Rules, arguments and programs are drawn alike.
Passes are counted instead of seconds, as each pass costs the same and other work on the machine does not disturb them.
"""

import argparse
import contextlib
import random
import statistics
from unittest import mock

from mutants import MUTANTS
from rich.console import Console
from rich.table import Table

from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence
from trioengine.testing.sim_loop import SimLoop

CHANGES = 3  # of priorities
WITHIN = 300  # passes


class Priorities:
    """In place of random.Random, for `SimLoop`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.of = {}
        self.changes = set(self.random.sample(range(WITHIN), CHANGES))
        self.passes = 0

    def shuffle(self, batch):
        for task in batch:
            self.of.setdefault(task, self.random.random())
        batch.sort(key=self.of.__getitem__)
        if self.passes in self.changes:
            self.of[batch[0]] = 1 + self.passes
            batch.append(batch.pop(0))
        self.passes += 1


def reorder_by_priorities(loop, seed):
    loop._order.random = Priorities(seed) if seed else None


@contextlib.contextmanager
def fifo():
    tick = SimLoop.tick
    with (
        mock.patch.object(SimLoop, "reorder"),
        mock.patch.object(SimLoop, "tick", lambda loop, passes=1, order=0: tick(loop, passes)),
    ):
        yield


ORDERS = {
    "fifo": fifo,
    "random": contextlib.nullcontext,
    "pct": lambda: mock.patch.object(SimLoop, "reorder", reorder_by_priorities),
}


def passes_to_find(mutant, seed, programs):
    """How many passes were run until the mutant was found; all of them, and False, if it was not."""
    with silence(), mutant.active():
        report = Fuzzer(MACHINES[mutant.machine], PROFILES["quick"], seed, shrink=False).run(examples=programs)
    return report.passes, report.failure is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", action="append", choices=MUTANTS, metavar="ID")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--programs", type=int, default=3000)
    given = parser.parse_args()
    table = Table("mutant", *(f"{name}: found, median passes" for name in ORDERS), box=None)
    found, passes = dict.fromkeys(ORDERS, 0), {name: [] for name in ORDERS}
    for id in given.mutant or MUTANTS:
        cells = []
        for name, order in ORDERS.items():
            with order():
                runs = [passes_to_find(MUTANTS[id], seed, given.programs) for seed in range(given.seeds)]
            found[name] += sum(is_found for _, is_found in runs)
            passes[name] += [count for count, _ in runs]
            cells.append(
                f"{sum(is_found for _, is_found in runs)}/{given.seeds} {statistics.median(n for n, _ in runs):,.0f}"
            )
        table.add_row(id, *cells)
        print(id, *cells, flush=True)
    table.add_row("all", *(f"{found[name]} {sum(passes[name]):,}" for name in ORDERS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
