"""How a command that failed ends: one line on stderr, and an exit code."""

from __future__ import annotations

import errno
import os
import sys

import typer

from trioengine.cli.mistakes import explained
from trioengine.cli.stderr import Stderr
from trioengine.core.errors import EngineError, InvalidConfig, RequestRejected


def exit_code(error: BaseException, stderr: Stderr) -> int:
    """Report why a command ended on stderr, in one line, and return its exit code."""

    def fail(message: str, code: int, bug: BaseException | None = None) -> int:
        stderr.fail(message, bug)
        return code

    match error := _leaf(error):
        case typer.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            return 130
        case typer.TyperException():
            return fail(explained(error), 2)
        case InvalidConfig() | RequestRejected():
            return fail(str(error), 2)
        case BrokenPipeError():
            _discard_output()
            return 1
        case OSError(errno=errno.ENOSPC, filename=None):
            _discard_output()
            return fail(f"cannot write to standard output: {error.strerror}", 1)
        case EngineError() | OSError():
            return fail(str(error), 1)
        case _:
            return fail(f"internal error: {type(error).__name__}: {error}", 1, error)


def _discard_output() -> None:
    """Discard the rest of the buffer, which the interpreter would fail to write at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leaf(error: BaseException) -> BaseException:
    """The first exception in nested groups; an interrupt before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    interrupts = error.subgroup(KeyboardInterrupt)
    return _leaf((error if interrupts is None else interrupts).exceptions[0])
