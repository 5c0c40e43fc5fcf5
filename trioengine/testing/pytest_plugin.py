"""A plugin for pytest: the fixture `lifecycle_fuzzer` runs a machine, and a failure shows how to replay it.

In conftest.py, `pytest_plugins = ["trioengine.testing.pytest_plugin"]`. It has no entry point: with one, pytest would
import trioengine for every test run, and rewrite the assertions of the whole package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from trioengine.testing.fuzz.describe import failure_text
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.machines import name_of
from trioengine.testing.fuzz.program import ReplayFile, UnknownStep
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report, replayed, silence

EXAMPLES = 200
MARKER = "lifecycle(profile, examples, seed): how lifecycle_fuzzer searches: quick or deep, how many programs, its seed"

RunMachine: TypeAlias = Callable[[type[Machine]], Report]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that override the marker."""
    group = parser.getgroup("trioengine")
    group.addoption("--fuzz-examples", type=int, help=f"programs for each lifecycle_fuzzer (default: {EXAMPLES})")
    group.addoption("--fuzz-seed", type=int, help="the seed of each lifecycle_fuzzer (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def lifecycle_fuzzer(request: pytest.FixtureRequest) -> RunMachine:
    """A function that runs programs on a machine and returns the report; it fails the test if one of them fails.

    The marker `lifecycle` gives the profile, the number of programs and the seed; the options --fuzz-examples and
    --fuzz-seed override it. A program that failed is kept in pytest's cache, for `trioengine fuzz --replay`; the next
    run begins with it, until it passes.
    """
    marker = request.node.get_closest_marker("lifecycle")
    given = {} if marker is None else dict(marker.kwargs)
    if unknown := given.keys() - {"profile", "examples", "seed"}:
        raise pytest.UsageError(
            f"the marker lifecycle takes profile, examples and seed, not {', '.join(sorted(unknown))}"
        )
    if (profile := given.get("profile", "quick")) not in PROFILES:
        raise pytest.UsageError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    examples = _first(request.config.getoption("--fuzz-examples"), given.get("examples"), EXAMPLES)
    seed = _first(request.config.getoption("--fuzz-seed"), given.get("seed"), 0)

    def run(machine: type[Machine]) -> Report:
        path = _path(request, machine)
        with silence():
            report = _kept(machine, path) or Fuzzer(machine, PROFILES[profile], seed).run(examples=examples)
        if report.failure is not None:
            pytest.fail(_complaint(machine, report, path), pytrace=False)
        return report

    return run


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _kept(machine: type[Machine], path: Path) -> Report | None:
    """The failure of the program in this file; the file is removed if it does not fail, or does not fit the machine."""
    try:
        program = ReplayFile.from_json(path.read_bytes()).program
        machine = machine.with_variant(program.variant)
    except (OSError, ValueError):  # it was not kept, or cannot be read
        path.unlink(missing_ok=True)
        return None
    with suppress(UnknownStep):  # the rules have changed
        if (failure := replayed(machine, program).failure) is not None:
            return Report(machine.__name__, seed=0, programs=1, failure=failure, program=program)
    path.unlink(missing_ok=True)
    return None


def _path(request: pytest.FixtureRequest, machine: type[Machine]) -> Path:
    cache = request.config.cache
    folder = Path(request.config.rootpath) if cache is None else cache.mkdir("trioengine")
    name = re.sub(r"[^\w.-]+", "-", f"{request.node.nodeid}-{machine.__name__}")
    return folder / f"{name}.json"


def _complaint(machine: type[Machine], report: Report, path: Path) -> str:
    failure, program = report.failure, report.program
    assert failure is not None and program is not None, "a failure has its program"
    with silence():
        trace = replayed(machine.with_variant(program.variant), program).trace
        text = failure_text(failure, machine, program, trace)
    where = "kept from an earlier run"
    if report.programs_to_find:
        where = f"found in program {report.programs_to_find} of seed {report.seed}"
        program.machine = name_of(machine)
        path.write_text(program.to_json(seed=report.seed, found=str(failure)), encoding="utf-8")
    return f"{text}\n{where}; replay it:\ntrioengine fuzz --replay {path}"
