"""A TOML file whose keys are the names of a command's flags, with - or _; the environment and the flags beat it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trioengine.cli.kinds import element_of, fits, is_list, rule
from trioengine.core.bounds import brief, did_you_mean
from trioengine.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The values in a file, by the names of the options."""

    path: Path
    values: Mapping[str, object] = field(repr=False)  # keys of clients among them
    spelling: Mapping[str, str]

    def where(self, name: str) -> str:
        """The place of an option, for a message."""
        return f"config file {self.path}: {self.spelling[name]}"


def read(path: Path, kinds: Mapping[str, Any]) -> ConfigFile:
    """A file for a command with options of these names and types.

    Raises InvalidConfig, which names the file and the key; a value for an option of text is not shown, as it may be a
    key of a client.
    """
    values: dict[str, object] = {}
    spelling: dict[str, str] = {}
    for key, value in _load(path).items():
        name = key.replace("-", "_")
        if name not in kinds and isinstance(value, dict):
            raise InvalidConfig(f"config file {path}: {brief(key)} is a table; options stand at the top, in no table")
        if name not in kinds:
            raise InvalidConfig(
                f"config file {path}: {brief(key)} is not an option of this command{_suggestion(key, kinds)}"
            )
        if name in values:
            raise InvalidConfig(f"config file {path}: {key} is there twice, as {spelling[name]}, too")
        if not fits(value, kinds[name]):
            raise InvalidConfig(f"config file {path}: {key} {_problem(value, kinds[name])}")
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


def _suggestion(key: str, kinds: Iterable[str]) -> str:
    """The option that was probably meant, spelled as the key is."""
    options = kinds if "_" in key else [name.replace("_", "-") for name in kinds]
    return did_you_mean(key, options)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode() + "\n")  # or a mistake in the last line has no number
    except OSError as exc:
        raise InvalidConfig(f"config file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidConfig(f"config file {path}: not UTF-8") from exc
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise InvalidConfig(f"config file {path}: not TOML: {exc}") from exc


def _problem(value: object, kind: Any) -> str:
    problem = rule(kind) + (", or a list of them" if is_list(kind) and isinstance(value, list) else "")
    return f"{problem}, got {brief(value)}" if element_of(kind) in (bool, int, float) else problem
