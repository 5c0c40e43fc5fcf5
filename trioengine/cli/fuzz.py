"""`trioengine fuzz`: search for a program of rules that breaks the engine, or replay one from a file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from trioengine.core.errors import InvalidConfig
from trioengine.testing.fuzz.describe import failure_text, trace_text
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.machines import MACHINES, machine_named, machine_of
from trioengine.testing.fuzz.parallel import Search, SearchDied, Searches
from trioengine.testing.fuzz.program import ReplayFile, versions
from trioengine.testing.fuzz.runner import Report, replayed, silence
from trioengine.testing.fuzz.trace import is_fuzzers_own, place

KEEP = Path("fuzz-failure.json")
FUZZER_FAILED = 3  # exit code
REFRESH = 0.25  # seconds between two lines of progress
SEEDS_APART = 1 << 40  # of searches with the same machine


class Progress:
    """A line a machine that shows how far its run is, where stderr is a terminal."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), transient=True, refresh_per_second=4, auto_refresh=False)
        self._shown = 0.0
        self._summaries: dict[tuple[str, int], str] = {}  # by machine and seed

    def __enter__(self) -> Progress:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, report: Report) -> None:
        self._summaries[report.machine, report.seed] = _summary(report)
        now = time.monotonic()
        if now - self._shown >= REFRESH:
            self._shown = now
            self._live.update("\n".join(self._summaries.values()), refresh=True)


def run(given: Mapping[str, Any]) -> int:
    """Run the command with the options that were given, by name, and return its exit code. Raises InvalidConfig."""
    if "replay" not in given:
        return fuzz(**given)
    for other in given:
        if other not in ("replay", "trace"):
            raise InvalidConfig(f"--replay and --{other} do not go together")
    return replay_file(given["replay"], trace=given.get("trace", False))


def fuzz(
    *,
    seconds: float | None = None,
    examples: int | None = None,
    seed: int = 0,
    profile: str = "quick",
    machine: str | None = None,
    jobs: int | None = None,
    keep: Path = KEEP,
    trace: bool = False,
) -> int:
    """Run the fuzzer, each machine for its share; return 1 if it found something, 3 for an error of its own.

    One machine that runs for a time searches in `jobs` processes, or in one for each core, with a seed for each.
    """
    if seconds is None and examples is None:
        seconds = 60.0
    if seconds is not None and not seconds > 0:
        raise InvalidConfig(f"--seconds must be more than 0, not {seconds:g}")
    names = list(MACHINES) if machine is None else [machine]
    machines = [_machine(name) for name in names]
    _check_writable(keep)
    seeds = [seed] * len(machines)
    if machine is not None and examples is None:
        jobs = jobs or len(os.sched_getaffinity(0))
        machines *= jobs
        seeds = [seed + index * SEEDS_APART for index in range(jobs)]
    jobs = min(jobs or len(machines), len(machines))
    share = None if seconds is None else seconds / math.ceil(len(machines) / jobs)
    programs = [None] * len(machines) if examples is None else shares(examples, len(machines))
    tasks = [Search(*each, share, trace) for each in zip(machines, seeds, repeat(profile), programs)]
    died: SearchDied | None = None
    with Progress() as progress:
        searches = Searches(tasks, jobs, progress.show, in_order=seconds is None)
        try:
            searches.run()
        except SearchDied as exc:
            died = exc
    code = _show(searches, machines, keep)
    if died is not None:
        print(f"trioengine: error: the fuzzer failed: {died}", file=sys.stderr)
    if searches.interrupted:
        raise KeyboardInterrupt
    return code or (FUZZER_FAILED if died is not None else 0)


def _show(searches: Searches, machines: Sequence[type[Machine]], keep: Path) -> int:
    """Print the verdict and the states that were reached, and keep the first failure; return the exit code."""
    results = dict(sorted(searches.results.items()))
    found = next((result for result in results.values() if result.has_failed), None)
    reports: dict[type[Machine], list[Report]] = {}
    for index, result in results.items():
        reports.setdefault(machines[index], []).append(result.report)
    if found is None:
        verdicts = "; ".join(_verdict(_together(each)) for each in reports.values())
        print("nothing found, and interrupted:" if searches.interrupted else "nothing found:", verdicts)
    else:
        print(found.text)
        if found.replay_file:
            keep.write_text(found.replay_file, encoding="utf-8")
            print(f"replay it: trioengine fuzz --replay {keep}\n")
    for machine, each in reports.items():
        _show_coverage(_together(each), machine.reachable)
    return 0 if found is None else FUZZER_FAILED if found.is_fuzzers_own else 1


def _together(reports: Sequence[Report]) -> Report:
    """The report of all searches with one machine."""
    return replace(
        reports[0],
        programs=sum(report.programs for report in reports),
        passes=sum(report.passes for report in reports),
        seconds=max(report.seconds for report in reports),
        coverage=sum((report.coverage for report in reports), Counter()),
    )


def _check_writable(keep: Path) -> None:
    try:
        existed = keep.exists()
        keep.open("a").close()
        if not existed:
            keep.unlink(missing_ok=True)
    except OSError as exc:
        raise InvalidConfig(f"--keep {keep}: {exc.strerror}") from exc


def shares(total: int, parts: int) -> list[int]:
    """Parts of `total`, as equal as can be; but none is less than 1."""
    return [max(1, (total + parts - 1 - index) // parts) for index in range(parts)]


def _show_coverage(report: Report, reachable: AbstractSet[str]) -> None:
    """Print how often each state was reached, and which transitions of the lifecycle tables were not."""
    print(_summary(report))
    print("\n".join(f"{count:8} {state}" for state, count in sorted(report.coverage.items())))
    missed = sorted(reachable - report.coverage.keys())
    if missed:
        print(f"not reached, {len(missed)} transitions:", *missed, sep="\n         ")


def _machine(name: str) -> type[Machine]:
    try:
        return machine_named(name)
    except ValueError as exc:
        raise InvalidConfig(f"--machine: {exc}") from exc
    except Exception as exc:  # of the module
        raise InvalidConfig(f"--machine {name}: {type(exc).__name__}: {exc}, at {place(exc)}") from exc


def replay_file(path: Path, *, trace: bool) -> int:
    """Run a kept program again; return 1 if it still fails, 3 if the fuzzer itself does."""
    try:
        kept = ReplayFile.from_json(path.read_bytes())
        machine_type = machine_of(kept.program)
        with silence():
            found = replayed(machine_type, kept.program)
    except OSError as exc:
        raise InvalidConfig(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise InvalidConfig(f"{path}: {exc}") from exc
    _compare(path, kept.versions)
    skipped, count = found.machine.program.skipped, len(kept.program.steps)
    print(
        f"{count} rule{'s' * (count != 1)}"
        f"{f', {skipped} skipped (not possible when their turn came)' if skipped else ''}, "
        f"steps of tasks {found.machine.checksum}"
    )
    if found.failure is not None:
        with silence():
            print(failure_text(found.failure, machine_type, kept.program, found.trace, whole=trace))
        return FUZZER_FAILED if is_fuzzers_own(found.failure) else 1
    print("it does not fail")
    if trace:
        print(trace_text(found.trace, whole=True))
    return 0


def _compare(path: Path, found_with: Mapping[str, str]) -> None:
    """Say which versions are others than those in the file."""
    here = {name: version for name, version in versions().items() if found_with.get(name, version) != version}
    if here:
        then, now = (", ".join(f"{name} {of[name]}" for name in here) for of in (found_with, here))
        print(f"{path}: found with {then}; here are {now}", file=sys.stderr)


def _verdict(report: Report) -> str:
    return f"{report.machine} {report.programs:,} programs, {report.passes:,} passes, {report.seconds:.1f} s"


def _summary(report: Report) -> str:
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.machine}, seed {report.seed}: {report.programs} programs ({report.programs / seconds:.0f}/s), "
        f"{report.passes} scheduler passes ({report.passes / seconds:.0f}/s), {len(report.coverage)} rare states, "
        f"{report.seconds:.0f} s"
    )
