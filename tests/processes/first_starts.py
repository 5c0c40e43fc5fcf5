"""Compare trees by the seconds that the kernels add to their first start, strictly in turn.

Usage: python tests/processes/first_starts.py TREE... [--rounds 5], with every package installed that a tree needs. Each
round runs `trioengine bench offline` with one token twice, without compiled kernels and with those that it compiled, in
a folder of its own with the default model. Prints the seconds of both and the difference, then the medians.
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


def seconds_of_start(tree: str, home: Path) -> float:
    """Return the seconds of the whole command, from its start to its end."""
    environment = os.environ | {"PYTHONPATH": tree, "TRIOENGINE_HOME": str(home)}
    start = time.perf_counter()
    line = [sys.executable, "-m", "trioengine", *COMMAND]
    subprocess.run(line, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Run the rounds, and print their seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = pull(DEFAULT_MODEL)
    found: dict[str, list[tuple[float, float]]] = {tree: [] for tree in options.trees}
    for _ in range(options.rounds):
        for tree, starts in found.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / model.parent.name).symlink_to(model.parent)
                first, following = (seconds_of_start(str(Path(tree).resolve()), Path(folder)) for _ in range(2))
            starts.append((first, following))
            print(f"{tree:15} first {first:.2f} next {following:.2f} more {first - following:.2f}", flush=True)
    for tree, starts in found.items():
        more = [first - following for first, following in starts]
        first, following = (statistics.median(each) for each in zip(*starts, strict=True))
        spread = f"{min(more):.2f}-{max(more):.2f}"
        print(f"{tree:15} first {first:.2f} next {following:.2f} more {statistics.median(more):.2f} ({spread})")


if __name__ == "__main__":
    main()
