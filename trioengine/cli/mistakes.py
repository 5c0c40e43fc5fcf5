"""Mistakes on the command line, in the same words whichever library has found them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import typer

from trioengine.cli.kinds import element_of, rule
from trioengine.cli.sources import words
from trioengine.core.bounds import brief, did_you_mean
from trioengine.serve.config import ServeConfig

_UNITS = ("Bytes", "Seconds", "Tokens")  # the first word of a help text
_SECRETS = {field.name for field in dataclasses.fields(ServeConfig) if not field.repr}


def explained(error: typer.TyperException) -> str:
    """The mistake, and which help to read."""
    context, problem = getattr(error, "ctx", None), _problem(error)
    end = "" if problem.endswith("?") else "."
    return f"{problem}{end}" if context is None else f"{problem}{end} See {context.command_path} --help."


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
    """The option that was probably meant, or the place where this one is taken."""
    if error.ctx is None:
        return ""
    name, command = error.option_name.lstrip("-"), error.ctx.command
    arguments = [each.name for each in command.params if each.param_type_name == "argument"]
    if name in arguments:
        return f"; it is an argument: {error.ctx.command_path} {name.upper()}"
    if arguments and not error.option_name.startswith("--"):
        return "; an argument that begins with - comes after --"
    elsewhere = _commands_with(name, error.ctx.find_root().command)
    return did_you_mean(name, ["help", *_flags(command)], "--") or (elsewhere and f"; it is an option of {elsewhere}")


def _commands_with(flag: str, group: Any) -> str:
    """The commands of a group that have an option."""
    return ", ".join(name for name, command in group.commands.items() if flag in _flags(command))


def _opposite(error: Any) -> str:
    """The flag that turns an option off."""
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
    said = words(error.ctx, parameter.name) or f"argument {parameter.name!r}"
    expected = rule(described.annotation, described.parameter_info.min, described.parameter_info.max)
    if parameter.name in _SECRETS:
        return f"{said} {expected}"
    kind, unit = element_of(described.annotation), (getattr(parameter, "help", "") or "").split(" ")[0].strip(";")
    expected += f" ({unit.lower()})" if unit in _UNITS else ""
    if kind in (int, float):
        with suppress(ValueError):
            value = kind(value)
    return f"{said} {expected}, got {brief(value)}"
