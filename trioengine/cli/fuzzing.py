"""`trioengine fuzz`: the lifecycle fuzzer on the engine itself, on its mutants, or on a program kept in a file."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from trioengine.core.errors import InvalidConfig
from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, replay
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report, silence
from trioengine.testing.mutants import MUTANTS, Mutant

MUTANT_SECONDS = 60.0
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
        self._live.__exit__(None, None, None)

    def show(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._shown >= REFRESH:
            self._shown = now
            self._live.update(_summary(report), refresh=True)


def fuzz(
    *,
    seconds: float | None,
    examples: int | None,
    seed: int,
    profile: str,
    machine: str | None,
    mutant: str | None,
    keep: Path,
) -> int:
    """Run the fuzzer, each machine for its share; 1 if it found something."""
    bug = _mutant(mutant)
    names = [bug.machine] if bug is not None else list(MACHINES) if machine is None else [_machine(machine)]
    if seconds is None and examples is None:
        seconds = 60.0
    share = None if seconds is None else seconds / len(names)
    programs = None if examples is None else -(-examples // len(names))
    for name in names:
        with silence(), Progress() as progress, _with(bug):
            fuzzer = Fuzzer(MACHINES[name], PROFILES[profile], seed, progress.show)
            report = fuzzer.run(examples=programs, seconds=share)
        print(_summary(report))
        print("\n".join(f"{count:8} {state}" for state, count in sorted(report.rare.items())))
        if report.failure is not None and report.program is not None:
            _keep(report.failure, report.program, keep, seed, mutant)
            return 1
    return 0


def _keep(failure: Exception, program: Program, keep: Path, seed: int, mutant: str | None) -> None:
    print(f"\n{type(failure).__name__}: {failure}\n\n{program}\n")
    keep.write_text(program.to_json(seed=seed, mutant=mutant, found=str(failure)), encoding="utf-8")
    print(f"trioengine fuzz --replay {keep}{f' --mutant {mutant}' if mutant else ''}")


def _machine(name: str) -> str:
    """Its whole name, of `engine` or such. Raises InvalidConfig."""
    short = {whole.removesuffix("Machine").lower(): whole for whole in MACHINES}
    if name not in short:
        raise InvalidConfig(f"no machine {name!r}; there are {', '.join(short)}")
    return short[name]


def _mutant(id: str | None) -> Mutant | None:
    if id is not None and id not in MUTANTS:
        raise InvalidConfig(f"no mutant {id!r}; there are {', '.join(MUTANTS)}")
    return None if id is None else MUTANTS[id]


def _with(mutant: Mutant | None) -> AbstractContextManager[None]:
    return nullcontext() if mutant is None else mutant.active()


def replay_file(path: Path, mutant: str | None) -> int:
    """Run a kept program again; 1 if it still fails."""
    try:
        program = Program.from_json(path.read_text(encoding="utf-8"))
        machine = program.machine_in(MACHINES)
    except (OSError, ValueError) as exc:
        raise InvalidConfig(f"{path}: {exc}") from exc
    bug = _mutant(mutant)
    with silence(), _with(bug):
        failure, checksum = _replayed(machine, program)
    print(f"{len(program.steps)} rules, steps of tasks {checksum}")
    if failure is not None:
        print(f"{type(failure).__name__}: {failure}")
    return int(failure is not None)


def _replayed(machine_type: type[Machine], program: Program) -> tuple[Exception | None, str]:
    machine = machine_type()
    failure: Exception | None = None
    try:
        replay(machine, program)
    except ValueError as exc:
        raise InvalidConfig(str(exc)) from exc
    except Finding as finding:
        failure = finding.error
    return failure, machine.checksum


def mutants(*, seeds: int, profile: str) -> int:
    """Every mutant under every seed, as a table; 1 if one was not found."""
    table = Table("mutant", "found", "programs", "seconds", "rules", "failure", box=None)
    hunts = 0
    all_found: list[Report] = []
    for mutant in MUTANTS.values():
        reports = [_hunt(mutant, seed, profile) for seed in range(seeds)]
        found = [report for report in reports if report.failure is not None]
        hunts += seeds
        all_found += found
        table.add_row(mutant.id, f"{len(found)}/{seeds}", *_medians(found), mutant.failure)
        print(f"{mutant.id}: {len(found)} of {seeds}", file=sys.stderr, flush=True)
    table.add_row("all", f"{len(all_found)}/{hunts}", *_medians(all_found))
    Console(width=150).print(table)
    return int(len(all_found) < hunts)


def _hunt(mutant: Mutant, seed: int, profile: str) -> Report:
    with silence(), mutant.active():
        return Fuzzer(MACHINES[mutant.machine], PROFILES[profile], seed).run(seconds=MUTANT_SECONDS)


def _medians(found: list[Report]) -> tuple[str, str, str]:
    if not found:
        return "-", "-", "-"
    programs = statistics.median(report.programs_to_find for report in found)
    seconds = [report.seconds_to_find for report in found]
    lengths = [report.program.length for report in found if report.program is not None]
    return (
        f"{programs:g}",
        f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})",
        f"{statistics.median(lengths):g} (at most {max(lengths)})",
    )


def _summary(report: Report) -> str:
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.machine}, seed {report.seed}: {report.programs} programs ({report.programs / seconds:.0f}/s), "
        f"{report.passes} scheduler passes ({report.passes / seconds:.0f}/s), {len(report.rare)} rare states, "
        f"{report.seconds:.0f} s"
    )
