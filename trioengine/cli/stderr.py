"""Lines of the command line itself on stderr: text, or the JSON objects of `serve --log-json`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from trioengine.cli.complaints import complain
from trioengine.cli.config_file import is_true

_FLAG, _VARIABLE = "--log-json", "TRIOENGINE_LOG_JSON"
_CONFIG, _CONFIG_VARIABLE = "--config", "TRIOENGINE_CONFIG"
_YES = ("1", "true", "t", "yes", "y", "on")


class Stderr:
    """Standard error in one of the two formats; the format may change while the options are read."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Stderr:
        """The format that the arguments, the environment or the file of options ask for; each may still be refused."""
        return cls(as_json=arguments[:1] == ["serve"] and _is_asked_for(arguments, environment))

    def warn(self, message: str) -> None:
        """Write a line about something that does not end the command."""
        self._write("warning", message)

    def fail(self, message: str, error: BaseException | None = None) -> None:
        """Write the last line of a command that failed; JSON has the traceback of `error`."""
        self._write("error", " ".join(message.split()), error)

    def _write(self, level: str, message: str, error: BaseException | None = None) -> None:
        if not self.as_json:
            complain(f"{level}: {message}")
            return
        with suppress(OSError):  # where nothing reads it
            print(json_record(level, "trioengine", message, error), file=sys.stderr)


def _is_asked_for(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    if _FLAG in arguments:
        return True
    if value := environment.get(_VARIABLE):
        return value.lower() in _YES
    path = _config_of(arguments) or environment.get(_CONFIG_VARIABLE)
    return bool(path) and is_true(Path(str(path)), "log_json")


def _config_of(arguments: Sequence[str]) -> str | None:
    """The file of options that the arguments name."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == _CONFIG:
            return value or next(iter(arguments[index + 1 :]), None)
    return None


def json_record(level: str, logger: str, message: str, error: BaseException | None = None) -> str:
    """A line of the JSON log, as logs.JsonFormatter writes it."""
    record = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "logger": logger,
        "message": message,
    }
    if error is not None:
        record["exception"] = "".join(traceback.format_exception(error)).rstrip()
    return json.dumps(record)
