"""The trace of one program: its rules, the transitions, frames and bytes that followed, and the place of a failure."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import trio

from trioengine.actors.observer import Observer
from trioengine.core.lifecycle import Attachment, Event, Phase, PowerEvent, PowerStage
from trioengine.core.messages import WIRE_NAMES, Message, TokensRow
from trioengine.testing.simulated_worker import Handled, SimulatedWorker, WorkerObserver

_FUZZER, _KIT, _PACKAGE = (f"{folder}{os.sep}" for folder in Path(__file__).parents[:3])
_CALLERS_OF_THE_PROGRAM = (f"{_KIT}sim_loop.py", f"{_FUZZER}machine.py")  # of tasks, and of rules
_INSTALLED = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(trio.__file__).parent)
_LIBRARIES = (*(f"{folder}{os.sep}" for folder in _INSTALLED), "<")
_MOST = 72  # characters of a value
_AFTER_TIME = " s  "


class Trace(Observer, WorkerObserver, trio.abc.Instrument):
    """Lines, each with the scheduler pass and the simulated time at which it was added.

    An event of the engine shows the line of the user's program that caused it, if one did.
    """

    def __init__(self, now: Callable[[], tuple[int, float]]) -> None:
        """`now` returns the number of passes that were run, and the time in seconds."""
        self.lines: list[str] = []
        self._now = now
        self._is_over = False

    def add(self, line: str) -> None:
        """Add a line, unless the trace has ended."""
        if not self._is_over:
            passes, seconds = self._now()
            self.lines.append(f"{passes:6} {seconds:8.2f}{_AFTER_TIME}{line}")

    def end(self) -> None:
        """The program has failed; the clean-up that follows explains nothing."""
        self.add("the failure")
        self._is_over = True

    def folded(self) -> Iterator[str]:
        """Return the lines, and one for a run of lines that differ only in their passes and times."""
        for _, run in itertools.groupby(self.lines, key=lambda line: line.partition(_AFTER_TIME)[2]):
            first, *more = run
            last = more[-1].partition(_AFTER_TIME)[0].split()[-1] if more else ""
            yield f"{first}, {len(more) + 1} times to {last} s" if more else first

    def rule(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A rule begins."""
        self.add(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")

    def bytes_arrived(self, client: int, direction: str, data: bytes) -> None:
        """Bytes of a client's connection arrive."""
        self.add(f"  client {client} {direction} server: {len(data)} bytes {_short(data)}")

    # ---- the user's program -----------------------------------------------------------------------------------------

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        if _is_users_task(task):
            self.add(f"  task {task.name} starts{_by()}")

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        if _is_users_task(task):
            self.add(f"  task {task.name} ends")

    # ---- the engine -------------------------------------------------------------------------------------------------

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        self.add(f"  session {getattr(actor, 'id', '?')}, {phase.value}, {attachment.value}: {event.value}{_by()}")

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        self.add(f"  engine, {stage.value}: {event.value}{_by()}")

    # ---- the worker -------------------------------------------------------------------------------------------------

    def handling(self, worker: SimulatedWorker, event: Handled) -> None:
        self.add(f"  worker {worker.pid} <- {_frame(event)}")

    def sending(self, worker: SimulatedWorker, messages: Sequence[Message]) -> None:
        for message in messages:
            self.add(f"  worker {worker.pid} -> {_frame(message)}")

    def dying(self, worker: SimulatedWorker) -> None:
        self.add(f"  worker {worker.pid} dies")


def _frame(message: object) -> str:
    parts = [WIRE_NAMES.get(type(message), type(message).__name__).upper()]
    for row in getattr(message, "rows", [message]):
        parts += [f"{key} {getattr(row, key)}" for key in ("session", "request") if hasattr(row, key)]
        if isinstance(row, TokensRow) and row.finish_reason is not None:
            parts.append(row.finish_reason.value)
    return " ".join(parts)


def _is_users_task(task: trio.lowlevel.Task) -> bool:
    code = getattr(task.coro, "cr_code", None)  # a coroutine that is not Python's has none
    return code is not None and is_users(code.co_filename)


def _by() -> str:
    """The innermost line of the task or rule that runs now, if it is the user's, for the end of a line; or empty."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS_OF_THE_PROGRAM):
        if is_users(frame.f_code.co_filename):
            return f", by {Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def is_packages(file: str) -> bool:
    """Whether code in this file is this package's."""
    return file.startswith(_PACKAGE)


def is_kits(file: str) -> bool:
    """Whether code in this file is `trioengine.testing`'s."""
    return file.startswith(_KIT)


def is_library(file: str) -> bool:
    """Whether code in this file is neither this package's nor a user's."""
    return file.startswith(_LIBRARIES) and not is_packages(file)


def is_users(file: str) -> bool:
    """Whether code in this file is neither a library's nor this package's."""
    return not is_library(file) and not is_packages(file)


def is_under_test(file: str) -> bool:
    """Whether code in this file is neither a library's nor the kit's."""
    return not is_library(file) and not is_kits(file)


def short_path(file: str) -> str:
    """Relative to the package's parent or to the working directory, where it is in one of these."""
    folders = (f"{folder}{os.sep}" for folder in (Path(_PACKAGE).parent, Path.cwd()))
    return next((file.removeprefix(folder) for folder in folders if file.startswith(folder)), file)


def place(error: BaseException) -> str:
    """The innermost line of the error's traceback that is neither a library's nor the kit's.

    It is the kit's if there is no other, and for an error of the fuzzer itself.
    """
    frames = _own_frames(error)
    if not is_fuzzers_own(error):
        frames = [frame for frame in frames if not frame.filename.startswith(_KIT)] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "an unknown place"


def current_place() -> str:
    """The innermost line of the current stack that is neither a library's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, *_LIBRARIES)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def is_fuzzers_own(error: BaseException) -> bool:
    """Whether the error is a bug of the fuzzer's: it comes from the fuzzer's code, and is not a failed assertion."""
    frames = _own_frames(error)
    return bool(frames) and not isinstance(error, AssertionError) and frames[-1].filename.startswith(_FUZZER)


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
