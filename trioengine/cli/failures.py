"""How a command that failed ends: one line on stderr, and an exit code."""

from __future__ import annotations

import dataclasses
import os
import sys

import typer

from trioengine.cli.sources import words
from trioengine.cli.stderr import Stderr
from trioengine.core.bounds import brief
from trioengine.core.errors import EngineError, InvalidConfig, RequestRejected
from trioengine.core.serve_config import ServeConfig

_SECRETS = {field.name for field in dataclasses.fields(ServeConfig) if not field.repr}


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
            return fail(_usage(error), 2)
        case InvalidConfig() | RequestRejected():
            return fail(str(error), 2)
        case BrokenPipeError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
            return 1
        case EngineError() | OSError():
            return fail(str(error), 1)
        case _:
            return fail(f"internal error: {type(error).__name__}: {error}", 1, error)


def _usage(error: typer.TyperException) -> str:
    """What is wrong with what was typed, and which help to read."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if isinstance(error, typer.BadParameter) and context is not None and parameter is not None:
        said = words(context, parameter.name)
        error.param_hint = error.param_hint if said is None else f"'{said}'"
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    for problem in getattr(error.__cause__, "errors", list)()[:1]:  # pydantic's; most do not show the value
        value = brief(problem["input"])
        is_secret = parameter is not None and parameter.name in _SECRETS
        message += "" if is_secret or value in message else f", got {value}"
    return f"{message}." if context is None else f"{message}. See {context.command_path} --help."


def _leaf(error: BaseException) -> BaseException:
    """The first exception in nested groups; an interrupt before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    interrupts = error.subgroup(KeyboardInterrupt)
    return _leaf((error if interrupts is None else interrupts).exceptions[0])
