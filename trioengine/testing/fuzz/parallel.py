"""Searches with several machines: each in a process of its own, some at a time, or one after the other in this one."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from trioengine.testing.fuzz.describe import failure_text
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.machines import name_of
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Progress, Report, replayed, silence
from trioengine.testing.fuzz.trace import is_fuzzers_own

REFRESH = 0.25  # seconds between two reports of a process, and between two looks at an interrupt


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
    """The report of a search, with its failure as text: an exception need not be picklable."""

    report: Report
    text: str = ""  # the failure as it is printed
    replay_file: str = ""  # empty if the fuzzer failed before it had a program
    is_fuzzers_own: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the search found a program that fails, or failed itself."""
        return bool(self.text)


class SearchDied(Exception):
    """The process of a search ended without a result, and had found nothing."""


def search(task: Search, progress: Progress, is_stopped: Callable[[], bool]) -> Result:
    """Run one search in this process. If `is_stopped` returns True, it ends after the current program."""

    def show_or_stop(report: Report) -> None:
        progress(report)
        if is_stopped():
            raise KeyboardInterrupt

    fuzzer = Fuzzer(task.machine, PROFILES[task.profile], task.seed, show_or_stop)
    with silence():
        try:
            with suppress(KeyboardInterrupt):
                fuzzer.run(examples=task.examples, seconds=task.seconds)
            return _described(fuzzer.report, task.machine, whole=task.whole_trace)
        except Exception as exc:
            text = f"the fuzzer itself failed: {type(exc).__name__}: {exc}\n\n{traceback.format_exc()}"
            return Result(replace(fuzzer.report, failure=None), text, is_fuzzers_own=True)


def _described(report: Report, machine: type[Machine], *, whole: bool) -> Result:
    failure, program = report.failure, report.program
    if failure is None or program is None:
        return Result(report)
    trace = replayed(machine.with_variant(program.variant), program).trace
    text = failure_text(failure, machine, program, trace, whole=whole)
    return Result(replace(report, failure=None), text, _kept(machine, report, str(failure)), is_fuzzers_own(failure))


def _kept(machine: type[Machine], report: Report, found: str) -> str:
    """The replay file."""
    assert report.program is not None, "it has found something"
    return replace(report.program, machine=name_of(machine)).to_json(seed=report.seed, found=found)


class Searches:
    """Searches of which up to `jobs` run at a time; a single one runs in this process.

    `results` are by the index of the task. A search that has found something ends the others, or with `in_order` only
    those behind it, so that the number of jobs does not change the results. The first interrupt ends all searches after
    their current programs, so that nothing that was found is lost; the second one ends them at once.
    """

    def __init__(self, tasks: Sequence[Search], jobs: int, progress: Progress, *, in_order: bool) -> None:
        self.results: dict[int, Result] = {}
        self.interrupted = False
        self._tasks = tasks
        self._jobs = min(jobs, len(tasks))
        self._progress = progress
        self._in_order = in_order
        self._waiting = deque(enumerate(tasks))
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}
        self._found: dict[int, Report] = {}  # by searches that shrink it

    def run(self) -> None:
        """Run until all are over. Raises SearchDied, and KeyboardInterrupt at the second interrupt."""
        with self._first_interrupt_noted():
            if self._jobs == 1:
                self._run_here()
            else:
                self._run_apart()

    @contextmanager
    def _first_interrupt_noted(self) -> Iterator[None]:
        """An exception of a signal's handler could be lost in a finalizer: the first interrupt sets a flag."""

        def note(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _run_here(self) -> None:
        for index, task in enumerate(self._tasks):
            self.results[index] = search(task, self._progress, lambda: self.interrupted)
            if self.interrupted or self.results[index].has_failed:
                return

    def _run_apart(self) -> None:
        try:
            while self._running or (self._waiting and not self.interrupted):
                while self._waiting and len(self._running) < self._jobs and not self.interrupted:
                    self._start(*self._waiting.popleft())
                for connection in cast("list[Connection]", wait(list(self._running), timeout=REFRESH)):
                    if connection in self._running:
                        self._receive(connection)
                if self.interrupted:
                    for connection in self._running:
                        with suppress(OSError):  # it has ended
                            connection.send("stop")
        finally:
            self._end(list(self._running))

    def _end(self, connections: Sequence[Connection]) -> None:
        for connection in connections:
            _, process = self._running.pop(connection)
            process.kill()
            process.join()
            connection.close()

    def _end_others(self, finder: int) -> None:
        """End the searches that do not matter any more, since this one has found something."""
        last = finder if self._in_order else -1
        self._end([each for each, (index, _) in self._running.items() if index > last and index != finder])
        self._waiting.clear()  # each is behind those that run
        for index in [index for index in self.results if self._in_order and index > finder]:
            del self.results[index]

    def _start(self, index: int, task: Search) -> None:
        context = get_context("spawn")  # so that it inherits neither handlers of signals nor descriptors
        ours, theirs = context.Pipe()
        name = task.machine.__name__
        process = context.Process(target=_search_and_send, args=(task, theirs), name=name, daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # also in the process, for good
        try:
            process.start()
            self._running[ours] = index, process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def _receive(self, connection: Connection) -> None:
        """Take in a report or a result. Raises SearchDied."""
        index, process = self._running[connection]
        try:
            message: Result | Report = connection.recv()
        except (EOFError, OSError):
            process.join()
            message = self._unfinished(index, f"the process of {process.name} ended with exit code {process.exitcode}")
        if isinstance(message, Report):
            self._progress(message)
            if message.program is not None and index not in self._found:
                self._found[index] = message
                self._end_others(index)
            return
        self.results[index] = message
        del self._running[connection]
        connection.close()
        process.join()
        if message.has_failed:
            self._end_others(index)

    def _unfinished(self, index: int, death: str) -> Result:
        """The result of a search whose process has died: the program that it has found. Raises SearchDied."""
        if index not in self._found:
            raise SearchDied(death)
        report = self._found[index]
        text = f"a program fails, and when it was to be shrunk, {death}\n\n{report.program}"
        return Result(report, text, _kept(self._tasks[index].machine, report, death))


def _search_and_send(task: Search, connection: Connection) -> None:
    """Run a search in a process of its own, which ends early if its parent asks for it, or is gone."""
    sent = time.monotonic()
    has_found = False

    def send_report(report: Report) -> None:
        nonlocal sent, has_found
        now = time.monotonic()
        if now - sent >= REFRESH or (report.program is not None and not has_found):
            sent, has_found = now, report.program is not None
            connection.send(replace(report, failure=None))

    try:
        connection.send(search(task, send_report, connection.poll))
    except OSError:  # the parent is gone
        os._exit(1)
