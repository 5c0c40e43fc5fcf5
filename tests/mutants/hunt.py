"""Hunt mutants with the fuzzer and print a table: mutant, seeds that found it, programs, seconds and rules it took.

Usage: python tests/mutants/hunt.py [--mutant ID]... [--seeds N] [--profile quick|deep] [--no-shrink | --replay FILE]

With one --mutant each shrunk program is printed, too; with --replay a kept program runs with that mutant instead.
Exit code 1 if a seed did not find its mutant, or a replayed program failed.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS
from rich.console import Console
from rich.table import Table

from trioengine.testing.fuzz.machines import MACHINES, machine_of
from trioengine.testing.fuzz.program import ReplayFile
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, replayed, silence

SECONDS = 60.0  # of a hunt


class Found(NamedTuple):
    """A hunt that succeeded; without the failure, whose traceback holds a whole machine."""

    programs: int
    seconds: float
    length: int
    program: str


def hunt(mutant, seed, profile, *, shrink):
    """Return what was found; None if nothing was, if the mutant does not explain it, or if it fails without it."""
    machine = MACHINES[mutant.machine]
    with silence(), mutant.active():
        report = Fuzzer(machine, PROFILES[profile], seed, shrink=shrink).run(seconds=SECONDS)
    if report.program is None:
        print(f"{mutant.id}, seed {seed}: nothing in {report.programs} programs", file=sys.stderr, flush=True)
        return None
    if not mutant.explains(report.failure):
        print(f"{mutant.id}, seed {seed}: for another reason: {report.failure!r}", file=sys.stderr, flush=True)
        return None
    with silence():
        without = replayed(machine_of(report.program), report.program)
    if without.failure is not None:
        print(f"WITHOUT {mutant.id}, too: {without.failure}\n{report.program}", file=sys.stderr, flush=True)
        return None
    return Found(report.programs_to_find, report.seconds_to_find, report.program.length, str(report.program))


def hunt_all(hunted, seeds, profile, *, shrink):
    """Hunt each mutant with each seed and print the table; 1 if one was not found."""
    table = Table("mutant", "found", "programs", "seconds", "rules", "failure", box=None)
    all_found, minutes = [], len(hunted) * seeds * SECONDS / 60
    shrinking = ", and shrinking" if shrink else ""
    print(f"{len(hunted)} mutants, {seeds} seeds each: at most {minutes:g} minutes{shrinking}", file=sys.stderr)
    for mutant in hunted:
        found = [result for seed in range(seeds) if (result := hunt(mutant, seed, profile, shrink=shrink))]
        all_found += found
        table.add_row(mutant.id, f"{len(found)}/{seeds}", *medians(found), mutant.failure)
        programs, seconds, rules = medians(found)
        line = f"{mutant.id}: {len(found)} of {seeds}, {programs} programs, {seconds} seconds, {rules} rules"
        print(line, file=sys.stderr, flush=True)
    if len(hunted) == 1:
        print("\n\n".join(result.program for result in all_found))
    table.add_row("all", f"{len(all_found)}/{seeds * len(hunted)}", *medians(all_found))
    Console(width=150).print(table)
    return int(len(all_found) < seeds * len(hunted))


def medians(found):
    """The columns of programs, seconds and rules."""
    if not found:
        return "-", "-", "-"
    seconds = [result.seconds for result in found]
    lengths = [result.length for result in found]
    return (
        f"{statistics.median(result.programs for result in found):g}",
        f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})",
        f"{statistics.median(lengths):g} (at most {max(lengths)})",
    )


def replay_with(mutant, path):
    """Run a kept program with the mutant; 1 if it fails."""
    program = ReplayFile.from_json(path.read_bytes()).program
    with silence(), mutant.active():
        found = replayed(machine_of(program), program)
    print(f"{len(program.steps)} rules, {found.machine.program.skipped} skipped, mutant {mutant.id}: {found.failure!r}")
    return int(found.failure is not None)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", action="append", choices=MUTANTS, metavar="ID")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--profile", choices=PROFILES, default="quick")
    parser.add_argument("--no-shrink", action="store_true", help="keep the programs as they were found")
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args(arguments)
    hunted = [MUTANTS[id] for id in given.mutant or MUTANTS]
    if given.replay is None:
        return hunt_all(hunted, given.seeds, given.profile, shrink=not given.no_shrink)
    if len(hunted) != 1:
        parser.error("--replay takes one --mutant")
    return replay_with(hunted[0], given.replay)


if __name__ == "__main__":
    sys.exit(main())
