"""Runs searches in processes of their own, so many at a time: each machine with its share of the time or programs."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from trioengine.testing.fuzz.describe import failure_text
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.machines import name_of
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Progress, Report, replayed, silence
from trioengine.testing.fuzz.trace import is_fuzzers_own

REFRESH = 0.25  # seconds between two reports of a process


@dataclass(frozen=True)
class Search:
    """One machine, and how long it runs: until `examples` programs or `seconds` are over, whichever is given."""

    machine: type[Machine]
    seed: int
    profile: str  # of PROFILES
    examples: int | None
    seconds: float | None
    whole_trace: bool


@dataclass(frozen=True)
class Result:
    """The report of a search without its exception, which is described: it need not be picklable."""

    report: Report
    text: str = ""  # the failure as it is printed
    replay_file: str = ""
    is_fuzzers_own: bool = False
    interrupted: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the search found a program that fails."""
        return bool(self.text)


def search(task: Search, progress: Progress | None = None) -> Result:
    """Run one search in this process; an interrupt ends it after the current program, and keeps its finding."""
    fuzzer = Fuzzer(task.machine, PROFILES[task.profile], task.seed, progress)
    interrupted = False
    with silence(), interrupts_call(fuzzer.stop):
        try:
            fuzzer.run(examples=task.examples, seconds=task.seconds)
        except KeyboardInterrupt:
            interrupted = True
        return replace(_described(fuzzer.report, task.machine, whole=task.whole_trace), interrupted=interrupted)


@contextmanager
def interrupts_call(function: Callable[[], None]) -> Iterator[None]:
    """Within, SIGINT calls this function, and raises nothing: an exception could be lost in a finalizer."""
    before = signal.signal(signal.SIGINT, lambda *_: function())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _described(report: Report, machine: type[Machine], *, whole: bool) -> Result:
    failure, program = report.failure, report.program
    if failure is None or program is None:
        return Result(report)
    program.machine = name_of(machine)
    trace = replayed(machine.with_variant(program.variant), program).trace
    text = failure_text(failure, program, trace, whole=whole)
    kept = program.to_json(seed=report.seed, found=str(failure))
    return Result(replace(report, failure=None), text, kept, is_fuzzers_own(failure))


class SearchDied(Exception):
    """The process of a search ended without a result."""


def run_searches(tasks: Sequence[Search], jobs: int, progress: Progress) -> Generator[tuple[int, Result], None, None]:
    """Yield the results as they come, with their tasks' indices; closing the iterator ends the searches that still run.

    A single task runs in this process. An interrupt ends all searches; their results still come. Raises SearchDied.
    """
    if jobs == 1 or len(tasks) == 1:
        for index, task in enumerate(tasks):
            result = search(task, progress)
            yield index, result
            if result.interrupted:
                break
        return
    waiting = deque(enumerate(tasks))
    running: dict[Connection, tuple[int, BaseProcess]] = {}

    def interrupt() -> None:
        waiting.clear()
        for _, process in running.values():
            with suppress(ProcessLookupError):
                os.kill(process.ident or 0, signal.SIGINT)

    try:
        with interrupts_call(interrupt):
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, task = waiting.popleft()
                    connection, process = _started(task)
                    running[connection] = index, process
                for connection in cast("list[Connection]", wait(list(running))):
                    match _received(connection, running[connection][1]):
                        case Result() as result:
                            yield running.pop(connection)[0], result
                        case Report() as report:
                            progress(report)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _started(task: Search) -> tuple[Connection, BaseProcess]:
    ours, theirs = Pipe(duplex=False)
    process = Process(target=_search_and_send, args=(task, theirs), name=task.machine.__name__, daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _received(connection: Connection, process: BaseProcess) -> Result | Report:
    try:
        message: Result | Report = connection.recv()
    except EOFError:
        process.join()
        raise SearchDied(f"the process of {process.name} ended with exit code {process.exitcode}") from None
    if isinstance(message, Result):
        connection.close()
        process.join()
    return message


def _search_and_send(task: Search, connection: Connection) -> None:
    """Run in a process of its own. Reports are sent now and then, and the result in the end."""
    os.setsid()  # an interrupt from the terminal reaches the parent alone, which passes it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = time.monotonic()

    def send_report(report: Report) -> None:
        nonlocal sent
        if (now := time.monotonic()) - sent >= REFRESH:
            sent = now
            connection.send(replace(report, failure=None))

    connection.send(search(task, send_report))
