"""The sources of options: a flag beats an environment variable, which beats a TOML file given by `--config`.

Errors name an option as the user gave it: by its flag, its variable, or its key in the file. The keys of a file are the
names of a command's flags, with - or _.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import typer

from trioengine.core.errors import InvalidConfig, RequestRejected
from trioengine.core.wording import brief, did_you_mean

PREFIX = "TRIOENGINE_"
_OTHER_VARIABLES = (f"{PREFIX}HOME",)
_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
_TOML = {bool: bool, int: int, float: float | int, str: str, Path: str}  # the types that tomllib returns


def environment_variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{PREFIX}{name.upper()}"


def option_source(context: typer.Context, name: str) -> str | None:
    """The place of an option's value, for a message: a flag, a variable, or a file and a key.

    None if it was not given, or is an argument.
    """
    source = context.get_parameter_source(name)
    match source.name if source is not None else None:
        case "COMMANDLINE":
            parameter = next(parameter for parameter in context.command.params if parameter.name == name)
            return parameter.opts[0] if parameter.param_type_name == "option" else None
        case "ENVIRONMENT":
            return environment_variable(name)
        case "DEFAULT_MAP" if isinstance(context.obj, ConfigFile):
            return context.obj.where(name)
    return None


def given_on_command_line(context: typer.Context) -> list[str]:
    """The options and arguments that were given on the command line, by their names."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextmanager
def rename_fields_in_errors(context: typer.Context) -> Iterator[None]:
    """In InvalidConfig and RequestRejected from the block, replace the names of fields by the options' sources."""
    try:
        yield
    except InvalidConfig as exc:
        raise InvalidConfig(_renamed(context, str(exc), exc.fields), fields=exc.fields) from exc
    except RequestRejected as exc:
        fields = () if exc.param is None else (exc.param,)
        raise RequestRejected(exc.code, _renamed(context, exc.message, fields), param=exc.param) from exc


def _renamed(context: typer.Context, message: str, fields: Iterable[str]) -> str:
    flags = {each.name: each.opts[0] for each in context.command.params if each.param_type_name == "option"}
    for name in fields:
        option = option_source(context, name) or flags.get(name)
        if option is not None:
            message = re.sub(rf"\b{name}\b", option.replace("\\", r"\\"), message, count=1)
    return message


# ---- environment variables ------------------------------------------------------------------------------------------


def warn_about_unknown_variables(context: Any) -> None:
    """Write a warning for each variable TRIOENGINE_… that no command reads, with the similar name of one."""
    root = context.find_root()
    known = {name.removeprefix(PREFIX) for name in (*_variables_of(root.command), *_OTHER_VARIABLES)}
    given = {name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX)}
    for name in sorted(given - known):
        root.obj.warn(f"no option has the variable {PREFIX}{name}{did_you_mean(name, known, PREFIX)}")


def _variables_of(command: Any) -> Iterator[str]:
    """The variables of a command and of its subcommands."""
    for parameter in command.params:
        if parameter.envvar is not None:
            yield parameter.envvar
    for below in getattr(command, "commands", {}).values():
        yield from _variables_of(below)


# ---- config files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The values in a file, by the names of the options."""

    path: Path
    values: Mapping[str, object] = field(repr=False)  # API keys among them
    spelling: Mapping[str, str]

    def where(self, name: str) -> str:
        """The place of an option, for a message."""
        return f"config file {self.path}: {self.spelling[name]}"


def read_config_file(path: Path, kinds: Mapping[str, Any]) -> ConfigFile:
    """Read a file for a command with options of these names and types.

    Raises InvalidConfig, which names the file and the key. A value for an option of text is not shown, because it may
    be an API key.
    """
    values: dict[str, object] = {}
    spelling: dict[str, str] = {}
    for key, value in _load(path).items():
        name = key.replace("-", "_")
        problem = _problem(key, value, kinds)
        if problem is None and name in values:
            problem = f"{key} is given twice, also as {spelling[name]}"
        if problem is not None:
            raise InvalidConfig(f"config file {path}: {problem}")
        is_one_of_a_list = is_list(kinds[name]) and not isinstance(value, list)
        values[name], spelling[name] = [value] if is_one_of_a_list else value, key
    return ConfigFile(path, values, spelling)


def is_true(path: Path, name: str) -> bool:
    """Whether a file turns an option on, even if the rest of it will be refused. A pipe is not read."""
    with suppress(InvalidConfig, OSError):
        return path.is_file() and any(
            value is True for key, value in _load(path).items() if key.replace("-", "_") == name
        )
    return False


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode() + "\n")  # or a mistake in the last line has no number
    except OSError as exc:
        raise InvalidConfig(f"config file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidConfig(f"config file {path}: not UTF-8") from exc
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise InvalidConfig(f"config file {path}: not TOML: {exc}") from exc


def _problem(key: str, value: object, kinds: Mapping[str, Any]) -> str | None:
    name = key.replace("-", "_")
    if name not in kinds:
        if isinstance(value, dict):
            return f"{brief(key)} is a table; options stand at the top, in no table"
        options = kinds if "_" in key else [option.replace("_", "-") for option in kinds]  # spelled as the key is
        return f"{brief(key)} is not an option of this command{did_you_mean(key, options)}"
    kind = kinds[name]
    if fits(value, kind):
        return None
    expected = requirement(kind) + (", or a list of them" if is_list(kind) and isinstance(value, list) else "")
    return f"{key} {expected}" + (f", got {brief(value)}" if element_of(kind) in (bool, int, float) else "")


# ---- types of options -----------------------------------------------------------------------------------------------


def requirement(kind: Any, low: float | None = None, high: float | None = None) -> str:
    """The one wording for a wrong value: the type, or for a list the type of its elements, and inclusive bounds."""
    kind = element_of(kind)
    if typing.get_origin(kind) is Literal:
        return f"must be {_either(typing.get_args(kind))}"
    return f"must be {_WANTED[kind]}{_range(low, high)}"


def fits(value: object, kind: Any) -> bool:
    """Whether a TOML value has the type; for a list type, whether it is an element or a list."""
    if isinstance(value, list) and is_list(kind):
        return all(fits(each, element_of(kind)) for each in value)
    kind = element_of(kind)
    wanted = _TOML[str if typing.get_origin(kind) is Literal else kind]
    return isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))


def is_list(kind: Any) -> bool:
    """Whether an option may be given several times."""
    return typing.get_origin(kind) is list


def element_of(kind: Any) -> Any:
    """The type of one value of an option."""
    return typing.get_args(kind)[0] if is_list(kind) else kind


def _either(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"
