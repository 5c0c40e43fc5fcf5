"""Messages on stderr: warnings, and the one line and the exit code of a command that failed.

Usage errors have one wording, whichever library found them. `serve --log-json` turns the lines into JSON objects.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from trioengine.cli.sources import element_of, is_true, option_source, requirement
from trioengine.core.errors import EngineError, InvalidConfig, RequestRejected
from trioengine.core.wording import brief, did_you_mean, printable_lines
from trioengine.serve.config import ServeConfig

_FLAG, _VARIABLE = "--log-json", "TRIOENGINE_LOG_JSON"
_CONFIG, _CONFIG_VARIABLE = "--config", "TRIOENGINE_CONFIG"
_YES = ("1", "true", "t", "yes", "y", "on")
_UNITS = ("Bytes", "Seconds", "Tokens")  # the first word of a help text
_SECRETS = {field.name for field in dataclasses.fields(ServeConfig) if not field.repr}


def warn(text: str, *, before: str = "") -> None:
    """Write a line to stderr; `before` ends the line before it. A closed stderr is ignored.

    It is printable, and on a terminal it breaks at words.
    """
    line = f"trioengine: {text}"
    with suppress(OSError):
        if sys.stderr.isatty():
            from trioengine.cli.tty import wrapped  # with rich, which `--help` and `doctor` do without

            shown = wrapped(line, sys.stderr)
        else:
            shown = printable_lines(line)
        print(f"{before}{shown}", file=sys.stderr, flush=True)


class Stderr:
    """Standard error in one of two formats, text or JSON; the format may change while the options are read."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Stderr:
        """In the format that the arguments, the environment or the config file ask for, before they are validated."""
        return cls(as_json=arguments[:1] == ["serve"] and _asks_for_json(arguments, environment))

    def warn(self, message: str) -> None:
        """Write a line about a problem that does not end the command."""
        self._write("warning", message)

    def fail(self, message: str, error: BaseException | None = None) -> None:
        """Write the last line of a command that failed; JSON has the traceback of `error`."""
        self._write("error", " ".join(message.split()), error)

    def _write(self, level: str, message: str, error: BaseException | None = None) -> None:
        if not self.as_json:
            warn(f"{level}: {message}")
            return
        exception = None if error is None else "".join(traceback.format_exception(error)).rstrip()
        record = json_record(datetime.now(UTC), level, "trioengine", message, exception=exception)
        with suppress(OSError):  # stderr is closed
            print(record, file=sys.stderr)


def json_record(
    time: datetime,
    level: str,
    logger: str,
    message: str,
    fields: Mapping[str, object] | None = None,
    exception: str | None = None,
) -> str:
    """A line of the JSON log."""
    record = {
        "time": time.isoformat(timespec="milliseconds"),
        "level": level,
        "logger": logger,
        "message": message,
        **(fields or {}),
    }
    if exception is not None:
        record["exception"] = exception
    return json.dumps(record)


def report_failure(error: BaseException, stderr: Stderr) -> int:
    """Write the reason why a command ended to stderr, in one line, and return its exit code."""

    def fail(message: str, code: int, bug: BaseException | None = None) -> int:
        stderr.fail(message, bug)
        return code

    match error := _leaf(error):
        case typer.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            return 130
        case typer.TyperException():
            return fail(describe_usage_error(error), 2)
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


def describe_usage_error(error: typer.TyperException) -> str:
    """The mistake on the command line, and the help to read."""
    context, problem = getattr(error, "ctx", None), _problem(error)
    end = "" if problem.endswith("?") else "."
    return f"{problem}{end}" if context is None else f"{problem}{end} See {context.command_path} --help."


def _leaf(error: BaseException) -> BaseException:
    """The first exception in nested groups; an interrupt before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    interrupts = error.subgroup(KeyboardInterrupt)
    return _leaf((error if interrupts is None else interrupts).exceptions[0])


def _discard_output() -> None:
    """Discard the rest of the buffer, which the interpreter would fail to write at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _asks_for_json(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    if _FLAG in arguments:
        return True
    if value := environment.get(_VARIABLE):
        return value.lower() in _YES
    path = _config_path(arguments) or environment.get(_CONFIG_VARIABLE)
    return bool(path) and is_true(Path(str(path)), "log_json")


def _config_path(arguments: Sequence[str]) -> str | None:
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == _CONFIG:
            return value or next(iter(arguments[index + 1 :]), None)
    return None


def _problem(error: Any) -> str:
    match type(error).__name__:  # typer does not export the classes
        case "NoSuchOption":
            return f"unknown option {error.option_name}{_near(error)}"
        case "MissingParameter":
            return f"missing {error.param.param_type_name} {error.param.name!r}"
        case "BadOptionUsage" if "requires" in error.message:
            return f"{error.option_name} needs a value"
        case "BadOptionUsage":
            return f"{error.option_name} takes no value{_opposite(error)}"
        case "BadParameter" if hasattr(error.__cause__, "errors"):
            return _bad_value(error, error.__cause__.errors()[0]["input"])  # pydantic's
    return str(error.format_message()).rstrip(".")


def _near(error: Any) -> str:
    """A hint at a similar option, or at the command that has this one."""
    if error.ctx is None:
        return ""
    name, command = error.option_name.lstrip("-"), error.ctx.command
    arguments = [each.name for each in command.params if each.param_type_name == "argument"]
    if name in arguments:
        return f"; it is an argument: {error.ctx.command_path} {name.upper()}"
    if arguments and not error.option_name.startswith("--"):
        return "; an argument that begins with - comes after --"
    commands = error.ctx.find_root().command.commands
    elsewhere = ", ".join(other for other, each in commands.items() if name in _flags(each))
    return did_you_mean(name, ["help", *_flags(command)], "--") or (elsewhere and f"; it is an option of {elsewhere}")


def _opposite(error: Any) -> str:
    """A hint at the flag that turns an option off."""
    parameters = [] if error.ctx is None else error.ctx.command.params
    off = [each.secondary_opts[0] for each in parameters if error.option_name in each.opts and each.secondary_opts]
    return f"; its opposite is {off[0]}" if off else ""


def _flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                yield flag.removeprefix("--")


def _bad_value(error: Any, value: object) -> str:
    parameter = error.param
    described = parameter.type_descriptor
    source = option_source(error.ctx, parameter.name) or f"argument {parameter.name!r}"
    expected = requirement(described.annotation, described.parameter_info.min, described.parameter_info.max)
    if parameter.name in _SECRETS:
        return f"{source} {expected}"
    kind, unit = element_of(described.annotation), (getattr(parameter, "help", "") or "").split(" ")[0].strip(";")
    expected += f" ({unit.lower()})" if unit in _UNITS else ""
    if kind in (int, float):
        with suppress(ValueError):
            value = kind(value)
    return f"{source} {expected}, got {brief(value)}"
