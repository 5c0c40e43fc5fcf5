"""`trioengine fuzz --target URL`: search for a finding in a server, or replay one from a file."""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from trioengine.core.errors import InvalidConfig
from trioengine.core.wording import counted, printable
from trioengine.testing.target.artifacts import curl_lines, page, rate, schedule_svg, schedule_text, script
from trioengine.testing.target.calibrate import NoTarget, calibrate, detect, measure_start
from trioengine.testing.target.dialects import DIALECTS, OPENAI
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.hunt import REPLAYS, Found, Hunt, Outcome, program_of
from trioengine.testing.target.processes import figures_of, worker_of
from trioengine.testing.target.program import SIGNALS, Step

FOUND, NOTHING, FAILED = 1, 0, 3  # exit codes
MINUTES = 5.0


@dataclass(frozen=True)
class TargetOptions:
    """The options of the command that go with --target."""

    target: str
    dialect: str | None = None
    minutes: float | None = None
    seed: int = 0
    model: str | None = None
    api_key: str | None = None
    pid: int | None = None
    kill_worker: bool = False
    report: Path | None = None
    replay: Path | None = None
    keep: Path = Path("fuzz-finding.json")
    i_own_this_server: bool = False
    serve: tuple[str, ...] | None = None  # the arguments of the server that the command starts


def fuzz_target(options: TargetOptions) -> int:
    """Run the search and return the exit code. Raises InvalidConfig."""
    host, target = address_of(options.target, owned=options.i_own_this_server)
    check_options(options)
    replayed = None if options.replay is None else read_finding(options.replay)
    if replayed is not None and options.dialect is None:
        options = TargetOptions(**{**vars(options), "dialect": replayed[0]})
    _check_processes(options, () if replayed is None else replayed[1])
    if options.api_key is not None:
        target.headers["Authorization"] = f"Bearer {options.api_key}"
    driver = TrioDriver(host, int(target.host.rpartition(":")[2]), options.pid)
    return run_reported(_search, driver, target, options, None if replayed is None else replayed[1])


def run_reported(search: Callable[..., Awaitable[int]], *args: Any) -> int:
    """Run a search and return the exit code. Raises InvalidConfig if the server cannot be fuzzed."""
    try:
        return trio.run(search, *args)
    except NoTarget as exc:
        raise InvalidConfig(printable(str(exc))) from exc
    except OSError:
        raise
    except Exception as exc:
        print(f"trioengine: error: the fuzzer failed: {type(exc).__name__}: {exc}", file=sys.stderr)
        return FAILED


def address_of(url: str, *, owned: bool) -> tuple[str, Target]:
    """Return the host to connect to, and the target. Raises InvalidConfig."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as exc:
        raise InvalidConfig(f"--target {printable(url)}: {exc}") from exc
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InvalidConfig(f"--target must be a URL as http://127.0.0.1:8000, not {printable(url)}")
    if not _is_loopback(parts.hostname) and not owned:
        raise InvalidConfig(
            f"--target {parts.hostname} is another machine: fuzzing may stop its service; "
            "--i-own-this-server permits it"
        )
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, Target(f"{name}:{port}", path, OPENAI)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_options(options: TargetOptions) -> None:
    if options.dialect is not None and options.dialect not in DIALECTS:
        raise InvalidConfig(f"--dialect must be one of {', '.join(DIALECTS)}, not {printable(options.dialect)}")
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise InvalidConfig(f"--minutes must be more than 0, not {options.minutes:g}")
    if options.pid is not None and figures_of(options.pid) is None:
        raise InvalidConfig(f"--pid {options.pid}: there is no such process, or it belongs to another user")
    for path in (options.report, options.keep):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidConfig(f"{path}: there is no such directory")


def _check_processes(options: TargetOptions, steps: Sequence[Step]) -> None:
    """Check that the processes are known which get signals. Raises InvalidConfig."""
    rules = {step.rule for step in steps} & set(SIGNALS)
    if options.pid is None and options.kill_worker:
        raise InvalidConfig("--kill-worker needs --pid, the process whose child is killed")
    if options.pid is None and rules:
        raise InvalidConfig(f"{options.replay} has the step {min(rules)}, which needs --pid")
    if (options.kill_worker or Step("kill_worker") in steps) and worker_of(options.pid) is None:
        raise InvalidConfig(f"--pid {options.pid}: the process has no child, thus no worker to kill")


def read_finding(path: Path) -> tuple[str, list[Step], dict[str, Any]]:
    """Read a finding's file: the dialect's name, the steps, and everything. Raises InvalidConfig."""
    try:
        return program_of(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidConfig(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise InvalidConfig(f"{path}: {exc}") from exc


async def _search(driver: TrioDriver, target: Target, options: TargetOptions, steps: list[Step] | None) -> int:
    if options.dialect is None:
        target.dialect = await driver.run(detect(target))
    else:
        target.dialect = DIALECTS[options.dialect]
    await driver.run(calibrate(target, options.model))
    if options.kill_worker or Step("kill_worker") in (steps or ()):
        await driver.run(measure_start(target))
    describe(target, detected=options.dialect is None)
    faults = ("kill_worker",) if options.kill_worker else ()
    hunt = Hunt(driver, target, options.seed, show_progress, has_pid=options.pid is not None, faults=faults)
    return await run_hunt(hunt, options, steps)


async def run_hunt(hunt: Hunt, options: TargetOptions, steps: list[Step] | None) -> int:
    """Search, or replay the steps, and report; return the exit code."""
    target = hunt.target
    if steps is not None:
        return await _replay(hunt, steps)
    try:
        await hunt.search(seconds=60 * (MINUTES if options.minutes is None else options.minutes))
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        verdict = _verdict(hunt.outcome, target)
        print(verdict)
        _write(hunt.outcome, target, options, verdict)
    return FOUND if hunt.outcome.found else NOTHING


def describe(target: Target, *, detected: bool) -> None:
    golden = target.golden
    repeatable = "not judged" if golden.text is None else "also in a crowd" if golden.in_crowd else "alone"
    print(
        f"dialect {target.dialect.name}{' (detected)' if detected else ''}, model {printable(target.model)}, "
        f"deadline {target.deadline:.1f} s, greedy text {repeatable}",
        file=sys.stderr,
    )


def show_progress(outcome: Outcome) -> None:
    if sys.stderr.isatty():
        text = f"{outcome.programs} programs, {outcome.steps} steps, {outcome.seconds:.0f} s"
        print(f"\r{text}, {counted(len(outcome.found), 'finding')}", end="", file=sys.stderr, flush=True)


async def _replay(hunt: Hunt, steps: list[Step]) -> int:
    failed, message = 0, ""
    for _ in range(REPLAYS):
        _, finding = await hunt.run(steps)
        failed += finding is not None
        if finding is not None and hunt.fresh is not None:
            await hunt.fresh()
        message = message if finding is None else str(finding)
    print(f"{failed} of {REPLAYS} runs failed" + (f": {printable(message)}" if message else ""))
    return FOUND if failed else NOTHING


def _verdict(outcome: Outcome, target: Target) -> str:
    size = f"{outcome.programs} programs, {outcome.steps} steps, {outcome.seconds:.0f} s, dialect {target.dialect.name}"
    if not outcome.found:
        return f"nothing found: {size}"
    return f"{counted(len(outcome.found), 'finding')}: {size}"


def _write(outcome: Outcome, target: Target, options: TargetOptions, verdict: str) -> None:
    for index, found in enumerate(outcome.found):
        stem = options.keep if index == 0 else options.keep.with_stem(f"{options.keep.stem}-{index + 1}")
        print(f"\n{printable(str(found.finding))}\n{rate(found)}")
        print("\n".join(f"  {step}" for step in found.steps))
        _write_finding(found, target, stem, options.serve)
        print(_commands(found, target, stem, options))
    if options.report is not None:
        text = page(verdict, outcome.found, target, scripted=options.serve is None)
        options.report.write_text(text, encoding="utf-8")


def _commands(found: Found, target: Target, path: Path, options: TargetOptions) -> str:
    """Return the commands that run the program again."""
    signals = any(step.rule in SIGNALS for step in found.steps) and options.pid is not None
    again = f"trioengine fuzz --target {options.target}{f' --pid {options.pid}' if signals else ''} --replay {path}"
    if options.serve is not None:
        return again
    return f"{again}; python3 {path.with_suffix('.py')}{f' {target.host} {options.pid}' if signals else ''}"


def _write_finding(found: Found, target: Target, path: Path, serve: tuple[str, ...] | None) -> None:
    """Write the finding's files; scripts only for a server that runs already, since a script cannot start it."""
    path.with_suffix(".svg").write_text(schedule_svg(found.log), encoding="utf-8")
    path.with_suffix(".txt").write_text(schedule_text(found.log) + "\n", encoding="utf-8")
    if serve is not None:
        kept = json.loads(found.to_json(target)) | {"serve": serve}
        path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        return
    path.write_text(found.to_json(target), encoding="utf-8")
    path.with_suffix(".py").write_text(script(found, target), encoding="utf-8")
    path.with_suffix(".sh").write_text("\n".join(curl_lines(found, target)) + "\n", encoding="utf-8")
