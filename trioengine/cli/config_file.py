"""A TOML file whose keys are the names of a command's flags, with - or _; the environment and the flags beat it."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trioengine.cli.suggestion import suggestion
from trioengine.core.bounds import brief
from trioengine.core.errors import InvalidConfig

_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a string"}
_TOML = {bool: bool, int: int, float: float | int, str: str, Path: str}  # what tomllib gives


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says, by the names of the options."""

    path: Path
    values: Mapping[str, object] = field(repr=False)  # keys of clients among them
    spelling: Mapping[str, str]

    def where(self, name: str) -> str:
        """The place of an option, for a message."""
        return f"{self.path}: {self.spelling[name]}"


def read(path: Path, kinds: Mapping[str, Any]) -> ConfigFile:
    """A file for a command with options of these names and types.

    Raises InvalidConfig, which names the file and the key; a value is not shown, as it may be a key of a client.
    """
    values: dict[str, object] = {}
    spelling: dict[str, str] = {}
    for key, value in _load(path).items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise InvalidConfig(f"{path}: {brief(key)} is not an option of this command{_suggestion(key, kinds)}")
        if name in values:
            raise InvalidConfig(f"{path}: {key} is there twice, as {spelling[name]}, too")
        problem = _problem(value, kinds[name])
        if problem is not None:
            raise InvalidConfig(f"{path}: {key} {problem}")
        is_one_of_a_list = typing.get_origin(kinds[name]) is list and not isinstance(value, list)
        values[name], spelling[name] = [value] if is_one_of_a_list else value, key
    return ConfigFile(path, values, spelling)


def _suggestion(key: str, kinds: Iterable[str]) -> str:
    """The option that was probably meant, spelled as the key is."""
    options = kinds if "_" in key else [name.replace("_", "-") for name in kinds]
    return suggestion(key, options)


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as exc:
        raise InvalidConfig(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidConfig(f"{path}: not UTF-8") from exc
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise InvalidConfig(f"{path}: not TOML: {exc}") from exc


def _problem(value: object, kind: Any) -> str | None:
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        if isinstance(value, list):
            is_bad = any(_problem(each, kind) for each in value)
            return f"must be {_WANTED[kind]}, or a list of them" if is_bad else None
    if typing.get_origin(kind) is Literal:
        kind = str
    if isinstance(value, _TOML[kind]) and (kind is bool or not isinstance(value, bool)):
        return None
    return f"must be {_WANTED[kind]}"
