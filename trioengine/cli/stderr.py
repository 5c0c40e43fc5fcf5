"""Lines of the command line itself on stderr: text, or the JSON objects of `serve --log-json`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

_FLAG, _VARIABLE = "--log-json", "TRIOENGINE_LOG_JSON"
_NO = ("", "0", "false", "f", "no", "n", "off")


class Stderr:
    """Standard error in one of the two formats; the format may change while the options are read."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Stderr:
        """The format that the arguments and the environment ask for, which may still be refused."""
        asked = _FLAG in arguments or environment.get(_VARIABLE, "").lower() not in _NO
        return cls(as_json=asked and arguments[:1] == ["serve"])

    def warn(self, message: str) -> None:
        """Write a line about something that does not end the command."""
        self._write("warning", message)

    def fail(self, message: str, error: BaseException | None = None) -> None:
        """Write the last line of a command that failed; JSON has the traceback of `error`."""
        self._write("error", " ".join(message.split()), error)

    def _write(self, level: str, message: str, error: BaseException | None = None) -> None:
        if not self.as_json:
            from trioengine.cli.complaints import complain  # its wrapping wants a library that `--help` does without

            complain(f"{level}: {message}")
            return
        with suppress(OSError):  # where nothing reads it
            print(json_record(level, "trioengine", message, error), file=sys.stderr)


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
