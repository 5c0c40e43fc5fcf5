"""Compare trees by the seconds that the kernels add to the first start with a model, in turn.

Usage, with the root in PYTHONPATH: python tests/processes/first_starts.py TREE... [--rounds 5], with every package
installed that a tree needs. Each round starts `trioengine bench offline` with one token twice in an empty home with the
default model: at first the kernels are compiled, then they are found. Prints the seconds of each start and their
difference, then the medians, and the range of the differences. One start of each tree before them is not measured.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trioengine.core.config import DEFAULT_MODEL
from trioengine.hub.pull import pull

COMMAND = ("bench", "offline", "--requests", "1", "--prompt-len", "8", "--output-len", "1", "--repeat", "1")


def seconds_of_start(tree: Path, home: Path) -> float:
    """Return the seconds of the whole command."""
    environment = os.environ | {"PYTHONPATH": str(tree), "TRIOENGINE_HOME": str(home)}
    start = time.perf_counter()
    line = [sys.executable, "-m", "trioengine", *COMMAND]
    subprocess.run(line, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def first_and_next(tree: Path, model: Path) -> tuple[float, float]:
    """Return the seconds of the first start and of the next one. Exits if no kernels were compiled."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / model.parent.name).symlink_to(model.parent)
        first = seconds_of_start(tree, home)
        if not list(home.glob("kernels/*.so")):
            sys.exit(f"{tree}: no kernels were compiled")
        return first, seconds_of_start(tree, home)


def main() -> None:
    """Run the rounds, and print their seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = pull(DEFAULT_MODEL)
    trees = [Path(tree).resolve() for tree in options.trees]
    for tree in trees:
        first_and_next(tree, model)
    found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else trees[::-1]:
            first, following = first_and_next(tree, model)
            found[tree].append((first, following))
            print(f"{tree}: first {first:.2f}, next {following:.2f}, more {first - following:.2f}", flush=True)
    for tree, starts in found.items():
        more = [first - following for first, following in starts]
        first, following = (statistics.median(each) for each in zip(*starts, strict=True))
        spread = f"{min(more):.2f} to {max(more):.2f}"
        print(f"{tree}: first {first:.2f}, next {following:.2f}, more {statistics.median(more):.2f} ({spread})")


if __name__ == "__main__":
    main()
