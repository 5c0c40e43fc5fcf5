"""Where the value of an option came from, in the user's words: a flag, a variable, or a key of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from trioengine.cli.config_file import ConfigFile
from trioengine.core.bounds import did_you_mean
from trioengine.core.errors import InvalidConfig, RequestRejected

PREFIX = "TRIOENGINE_"
_OTHER_VARIABLES = (f"{PREFIX}HOME",)


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{PREFIX}{name.upper()}"


def warn_of_unknown_variables(context: Any) -> None:
    """Write a warning for each variable of ours that no command reads."""
    root = context.find_root()
    for warning in _unknown_variables(root.command, os.environ):
        root.obj.warn(warning)


def _unknown_variables(command: Any, environment: Iterable[str]) -> Iterator[str]:
    """Warnings of variables that no command reads, with the name that was probably meant."""
    known = {name.removeprefix(PREFIX) for name in (*_variables_of(command), *_OTHER_VARIABLES)}
    given = {name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX)}
    for name in sorted(given - known):
        yield f"no option has the variable {PREFIX}{name}{did_you_mean(name, known, PREFIX)}"


def _variables_of(command: Any) -> Iterator[str]:
    """The variables of a command and of the commands below it."""
    for parameter in command.params:
        if parameter.envvar is not None:
            yield parameter.envvar
    for below in getattr(command, "commands", {}).values():
        yield from _variables_of(below)


def words(context: typer.Context, name: str) -> str | None:
    """What the user calls the option that was given; None if none of this name was, or it is an argument."""
    source = context.get_parameter_source(name)
    match source.name if source is not None else None:
        case "COMMANDLINE":
            parameter = next(parameter for parameter in context.command.params if parameter.name == name)
            return parameter.opts[0] if parameter.param_type_name == "option" else None
        case "ENVIRONMENT":
            return variable(name)
        case "DEFAULT_MAP" if isinstance(context.obj, ConfigFile):
            return context.obj.where(name)
    return None


def _flag(context: typer.Context, name: str) -> str | None:
    """The flag of an option that was not given."""
    options = [each for each in context.command.params if each.param_type_name == "option"]
    return next((option.opts[0] for option in options if option.name == name), None)


def typed(context: typer.Context) -> list[str]:
    """The options and arguments that were given on the command line, by their names."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextmanager
def in_the_users_words(context: typer.Context) -> Iterator[None]:
    """Errors that name a field name what the user has given instead."""
    try:
        yield
    except InvalidConfig as exc:
        raise InvalidConfig(_translated(context, str(exc), exc.fields), fields=exc.fields) from exc
    except RequestRejected as exc:
        fields = () if exc.param is None else (exc.param,)
        raise RequestRejected(exc.code, _translated(context, exc.message, fields), param=exc.param) from exc


def _translated(context: typer.Context, message: str, fields: Iterable[str]) -> str:
    for field in fields:
        said = words(context, field) or _flag(context, field)
        if said is not None:
            message = re.sub(rf"\b{field}\b", said.replace("\\", r"\\"), message, count=1)
    return message
