"""`trioengine fuzz`: the lifecycle fuzzer on the engine itself, on its mutants, or on a program kept in a file."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from trioengine.core.errors import InvalidConfig
from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, ReplayFile, replay, versions
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report, silence
from trioengine.testing.mutants import MUTANTS, Mutant

MUTANT_SECONDS = 60.0
NO_MUTANT = "none"
KEEP = Path("fuzz-failure.json")
USED = {"mutants": ("seeds", "profile"), "replay": ("mutant",)}  # with these options, all but those would be ignored
REFRESH = 0.25  # seconds between two lines of progress


class Progress:
    """A line that says how far the run is, where stderr is a terminal."""

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
    """The command, with the options that were given, by name; its exit code. Raises InvalidConfig."""
    _refuse_ignored(given)
    if "mutants" in given:
        return mutants(seeds=given.get("seeds", 8), profile=given.get("profile", "quick"))
    if "replay" in given:
        return replay_file(given["replay"], given.get("mutant"))
    return fuzz(**given)


def _refuse_ignored(given: Collection[str]) -> None:
    for option, used in USED.items():
        for other in given:
            if option in given and other not in (option, *used):
                raise InvalidConfig(f"--{option} and --{other} do not go together")
    if "seeds" in given and "mutants" not in given:
        raise InvalidConfig("--seeds is for --mutants")


def fuzz(
    *,
    seconds: float | None = None,
    examples: int | None = None,
    seed: int = 0,
    profile: str = "quick",
    machine: str | None = None,
    mutant: str | None = None,
    keep: Path = KEEP,
) -> int:
    """Run the fuzzer, each machine for its share; 1 if it found something."""
    bug = _mutant(mutant)
    names = _machines(machine, bug)
    if seconds is None and examples is None:
        seconds = 60.0
    if seconds is not None and not seconds > 0:
        raise InvalidConfig(f"--seconds must be more than 0, not {seconds:g}")
    _check_writable(keep)
    reports = []
    time_share = None if seconds is None else seconds / len(names)
    programs = [None] * len(names) if examples is None else shares(examples, len(names))
    for name, program_share in zip(names, programs, strict=True):
        with Progress() as progress:
            fuzzer = Fuzzer(MACHINES[name], PROFILES[profile], seed, progress.show)
            try:
                with silence(), _with(bug):
                    fuzzer.run(examples=program_share, seconds=time_share)
            finally:  # interrupted, too
                progress.close()
                _show(fuzzer.report, keep, bug)
        if fuzzer.report.failure is not None:
            return 1
        reports.append(fuzzer.report)
    print("nothing found:", "; ".join(map(_verdict, reports)))
    return 0


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


def _show(report: Report, keep: Path, bug: Mutant | None) -> None:
    print(_summary(report))
    print("\n".join(f"{count:8} {state}" for state, count in sorted(report.rare.items())))
    failure, program = report.failure, report.program
    if failure is not None and program is not None:
        print(f"\n{type(failure).__name__}: {failure}\n\n{program}\n")
        mutant = None if bug is None else bug.id
        keep.write_text(program.to_json(seed=report.seed, mutant=mutant, found=str(failure)), encoding="utf-8")
        print(f"trioengine fuzz --replay {keep}")


def _machines(machine: str | None, bug: Mutant | None) -> list[str]:
    if bug is None:
        return list(MACHINES) if machine is None else [_machine(machine)]
    if machine is not None:
        raise InvalidConfig(f"--mutant and --machine do not go together: {bug.id} is for the {bug.machine}")
    return [bug.machine]


def _machine(name: str) -> str:
    """Its whole name, of `engine` or such. Raises InvalidConfig."""
    short = {whole.removesuffix("Machine").lower(): whole for whole in MACHINES}
    if name not in short:
        raise InvalidConfig(f"no machine {name!r}; there are {', '.join(short)}")
    return short[name]


def _mutant(id: str | None) -> Mutant | None:
    if id in (None, NO_MUTANT):
        return None
    if id not in MUTANTS:
        raise InvalidConfig(f"no mutant {id!r}; there are {', '.join(MUTANTS)}")
    return MUTANTS[id]


def _with(mutant: Mutant | None) -> AbstractContextManager[None]:
    return nullcontext() if mutant is None else mutant.active()


def replay_file(path: Path, mutant: str | None) -> int:
    """Run a kept program again, with its own mutant if none is named; 1 if it still fails."""
    bug = _mutant(mutant)
    try:
        kept = ReplayFile.from_json(path.read_bytes())
        machine_type = kept.program.machine_in(MACHINES)
        if mutant is None:
            bug = _mutant(kept.mutant)
        with silence(), _with(bug):
            machine, failure = _replayed(machine_type, kept.program)
    except OSError as exc:
        raise InvalidConfig(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise InvalidConfig(f"{path}: {exc}") from exc
    _compare(path, kept.versions)
    skipped = machine.program.skipped
    print(
        f"{len(kept.program.steps)} rules"
        f"{f', {skipped} skipped (not possible when their turn came)' if skipped else ''}, "
        f"steps of tasks {machine.checksum}{f', mutant {bug.id}' if bug else ''}"
    )
    if failure is not None:
        print(f"{type(failure).__name__}: {failure}")
    return int(failure is not None)


def _replayed(machine_type: type[Machine], program: Program) -> tuple[Machine, Exception | None]:
    machine = machine_type()
    try:
        replay(machine, program)
    except Finding as finding:
        return machine, finding.error
    return machine, None


def _compare(path: Path, found_with: Mapping[str, str]) -> None:
    """Say which versions are others than those in the file."""
    here = {name: version for name, version in versions().items() if found_with.get(name, version) != version}
    if here:
        then, now = (", ".join(f"{name} {of[name]}" for name in here) for of in (found_with, here))
        print(f"{path}: found with {then}; here are {now}", file=sys.stderr)


def mutants(*, seeds: int, profile: str) -> int:
    """Every mutant under every seed, as a table; 1 if one was not found."""
    table = Table("mutant", "found", "programs", "seconds", "rules", "failure", box=None)
    hunts = 0
    all_found: list[_Found] = []
    for mutant in MUTANTS.values():
        found = [hunt for seed in range(seeds) if (hunt := _hunt(mutant, seed, profile)) is not None]
        hunts += seeds
        all_found += found
        table.add_row(mutant.id, f"{len(found)}/{seeds}", *_medians(found), mutant.failure)
        print(f"{mutant.id}: {len(found)} of {seeds}", file=sys.stderr, flush=True)
    table.add_row("all", f"{len(all_found)}/{hunts}", *_medians(all_found))
    Console(width=150).print(table)
    return int(len(all_found) < hunts)


class _Found(NamedTuple):
    """A mutant that was found; not its failure, whose traceback holds a whole machine."""

    programs: int
    seconds: float
    length: int


def _hunt(mutant: Mutant, seed: int, profile: str) -> _Found | None:
    """None, too, where something was found that the mutant does not explain, or that is found without it."""
    machine = MACHINES[mutant.machine]
    with silence(), mutant.active():
        report = Fuzzer(machine, PROFILES[profile], seed).run(seconds=MUTANT_SECONDS)
    if report.program is None or not mutant.explains(report.failure):
        return None
    with silence():
        _, failure = _replayed(machine, report.program)
    if failure is not None:
        print(f"WITHOUT {mutant.id}, too: {failure}\n{report.program}", file=sys.stderr, flush=True)
        return None
    return _Found(report.programs_to_find, report.seconds_to_find, report.program.length)


def _medians(found: list[_Found]) -> tuple[str, str, str]:
    if not found:
        return "-", "-", "-"
    programs = statistics.median(hunt.programs for hunt in found)
    seconds = [hunt.seconds for hunt in found]
    lengths = [hunt.length for hunt in found]
    return (
        f"{programs:g}",
        f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})",
        f"{statistics.median(lengths):g} (at most {max(lengths)})",
    )


def _verdict(report: Report) -> str:
    return f"{report.machine} {report.programs:,} programs, {report.passes:,} passes, {report.seconds:.1f} s"


def _summary(report: Report) -> str:
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.machine}, seed {report.seed}: {report.programs} programs ({report.programs / seconds:.0f}/s), "
        f"{report.passes} scheduler passes ({report.passes / seconds:.0f}/s), {len(report.rare)} rare states, "
        f"{report.seconds:.0f} s"
    )
