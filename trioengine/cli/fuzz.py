"""`trioengine fuzz`: search for a program of rules that breaks the engine, or replay one from a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from trioengine.core.errors import InvalidConfig
from trioengine.testing.fuzz.describe import error_text, failure_text, trace_text
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.machines import MACHINES, machine_named, machine_of, name_of
from trioengine.testing.fuzz.program import ReplayFile, versions
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report, replayed, silence
from trioengine.testing.fuzz.trace import is_fuzzers_own, place

KEEP = Path("fuzz-failure.json")
FUZZER_FAILED = 3  # exit code
REFRESH = 0.25  # seconds between two lines of progress


class Progress:
    """A line that shows how far the run is, where stderr is a terminal."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), transient=True, refresh_per_second=4, auto_refresh=False)
        self._shown = 0.0

    def __enter__(self) -> Progress:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the line away."""
        self._live.stop()

    def show(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._shown >= REFRESH:
            self._shown = now
            self._live.update(_summary(report), refresh=True)


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
    keep: Path = KEEP,
    trace: bool = False,
) -> int:
    """Run the fuzzer, each machine for its share; return 1 if it found something, 3 for an error of its own."""
    names = list(MACHINES) if machine is None else [machine]
    machines = [_machine(name) for name in names]
    if seconds is None and examples is None:
        seconds = 60.0
    if seconds is not None and not seconds > 0:
        raise InvalidConfig(f"--seconds must be more than 0, not {seconds:g}")
    _check_writable(keep)
    reports = []
    time_share = None if seconds is None else seconds / len(names)
    programs = [None] * len(names) if examples is None else shares(examples, len(names))
    for made, program_share in zip(machines, programs, strict=True):
        with Progress() as progress:
            fuzzer = Fuzzer(made, PROFILES[profile], seed, progress.show)
            try:
                with silence():
                    fuzzer.run(examples=program_share, seconds=time_share)
            finally:  # also when interrupted
                progress.close()
                reports.append(fuzzer.report)
                if fuzzer.report.failure is not None:
                    _show_failure(fuzzer.report, keep, made, trace=trace)
        if fuzzer.report.failure is not None:
            break
    else:
        print("nothing found:", "; ".join(map(_verdict, reports)))
    for report, made in zip(reports, machines, strict=False):
        _show_coverage(report, made.reachable)
    return _exit_code(reports[-1].failure)


def _exit_code(failure: Exception | None) -> int:
    return 0 if failure is None else FUZZER_FAILED if is_fuzzers_own(failure) else 1


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


def _show_failure(report: Report, keep: Path, machine: type[Machine], *, trace: bool) -> None:
    """Print a report's failure, its program, its place and the end of its trace; keep the program."""
    failure, program = report.failure, report.program
    assert failure is not None and program is not None, "a failure has its program"
    program.machine = name_of(machine)
    keep.write_text(program.to_json(seed=report.seed, found=str(failure)), encoding="utf-8")
    with silence():
        found = replayed(machine.with_variant(program.variant), program)
    print(failure_text(failure, program, found.trace, whole=trace))
    print(f"replay it: trioengine fuzz --replay {keep}\n")


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
    skipped = found.machine.program.skipped
    print(
        f"{len(kept.program.steps)} rules"
        f"{f', {skipped} skipped (not possible when their turn came)' if skipped else ''}, "
        f"steps of tasks {found.machine.checksum}"
    )
    if found.failure is not None:
        print(error_text(found.failure))
    if found.failure is not None or trace:
        print(trace_text(found.trace, whole=trace))
    return _exit_code(found.failure)


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
