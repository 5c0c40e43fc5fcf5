"""Compare two trees by the start of `trioengine serve`, and by the CPU time of its API process, strictly in turn.

Usage: python tests/processes/start_times.py TREE_A TREE_B [ROUNDS [LOADED_ROUNDS [MODEL]]], with every package
installed that either tree needs. Prints, for each tree, medians of the seconds from the command to the worker's process
and to READY, of the CPU seconds of both processes until then, and, with LOADED_ROUNDS, of the CPU microseconds of the
API process a token, of 64 streams of 64 tokens; then the ratio of the medians, B to A, and the range of the rounds'
ratios. The load generator is TREE_A's for both. A model of one small layer instead of the default one leaves the
processor to the API process.
"""

import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROUNDS, PORT = 7, 8310
REQUESTS, PROMPT, OUTPUT = 64, 128, 64  # tokens
OPTIONS = ("--max-num-seqs", str(REQUESTS), "--max-model-len", "2048", "--log-level", "warning")
POLL = 0.01  # seconds


class Start(NamedTuple):
    """Seconds from the command to the worker's process and to READY; CPU seconds of both processes until then."""

    spawned: float
    ready: float
    cpu_api: float
    cpu_worker: float


def command(tree: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `trioengine` of a tree."""
    environment = os.environ | {"PYTHONPATH": tree}
    line = [sys.executable, "-m", "trioengine", *arguments]
    return subprocess.Popen(line, cwd=tree, env=environment, stdout=subprocess.DEVNULL)


def cpu_seconds(pid: int) -> float:
    """Return a process's CPU time, also of threads that have ended: of its clock, as clock_getcpuclockid names it."""
    return time.clock_gettime(~pid << 3 | 2)


def worker_of(pid: int) -> int | None:
    """Return the worker's process; None before it runs its program. Other children end at once."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        try:
            if b"trioengine.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:  # it has ended meanwhile
            continue
    return None


def is_ready(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200)
    except OSError:
        return False


@contextmanager
def serving(tree: str, port: int, model: tuple[str, ...]) -> Iterator[tuple[int, Start]]:
    """A server that is ready, as its process, and how it started."""
    began = time.monotonic()
    server = command(tree, "serve", *model, "--port", str(port), *OPTIONS)
    try:
        worker, spawned = None, 0.0
        while worker is None or not is_ready(port):
            if worker is None and (worker := worker_of(server.pid)) is not None:
                spawned = time.monotonic() - began
            with suppress(subprocess.TimeoutExpired):
                sys.exit(f"the server of {tree} ended with exit code {server.wait(POLL)}")
        took = time.monotonic() - began
        yield server.pid, Start(spawned, took, cpu_seconds(server.pid), cpu_seconds(worker))
    finally:
        server.terminate()
        server.wait()


def load(tree: str, port: int, seed: int) -> None:
    """Send the streams, and wait for their end."""
    sizes = ("--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--ignore-eos")
    server = ("--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(REQUESTS), "--seed", str(seed))
    if command(tree, "bench", "serve", *server, *sizes, "--json").wait() != 0:
        sys.exit("the load generator failed")


def measure_starts(trees: list[str], rounds: int, model: tuple[str, ...]) -> dict[str, list[list[float]]]:
    """Return each figure's values, for each tree."""
    starts: list[list[Start]] = [[], []]
    for _ in range(rounds):
        for found, tree in zip(starts, trees, strict=True):
            with serving(tree, PORT, model) as (_pid, start):
                found.append(start)
    return {name: [[getattr(start, name) for start in found] for found in starts] for name in Start._fields}


def measure_tokens(trees: list[str], rounds: int, model: tuple[str, ...]) -> list[list[float]]:
    """Return the API process's CPU microseconds a token, for each tree; the first round only warms up."""
    found: list[list[float]] = [[], []]
    with ExitStack() as servers:
        pids = [servers.enter_context(serving(tree, PORT + index, model))[0] for index, tree in enumerate(trees)]
        for seed in range(rounds + 1):
            for index, pid in list(enumerate(pids))[:: -1 if seed % 2 else 1]:
                before = cpu_seconds(pid)
                load(trees[0], PORT + index, seed)
                if seed > 0:
                    found[index].append((cpu_seconds(pid) - before) / (REQUESTS * OUTPUT) * 1e6)
    return found


def main() -> None:
    trees = [str(Path(tree).resolve()) for tree in sys.argv[1:3]]
    rounds, loaded = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((3, ROUNDS), (4, 0)))
    model = tuple(sys.argv[5:6])
    figures = measure_starts(trees, rounds, model)
    if loaded:
        figures["cpu_a_token_us"] = measure_tokens(trees, loaded, model)
    for name, (first, second) in figures.items():
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        before, after = statistics.median(first), statistics.median(second)
        print(f"{name}: {before:.2f} {after:.2f}, ratio {after / before:.3f} ({min(ratios):.3f}-{max(ratios):.3f})")


if __name__ == "__main__":
    main()
