"""The log of `trioengine serve` on stderr: lines for people, or one JSON object a line; also the workers' stderr."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import trio

from trioengine.actors.ports import Ports, spawn_worker
from trioengine.actors.supervisor import LOSS_FIELDS
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.cli.errors import json_record
from trioengine.core.wording import printable, printable_lines
from trioengine.serve.log_fields import CONTEXT, FIELDS, ContextFilter


def configure_logs(level: str, *, as_json: bool) -> None:
    """Write the records of trioengine from this level on; records of other libraries from warnings on at any level.

    (The debug records of a WebSocket library hold the headers, and with them the keys.)
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    handler.addFilter(ContextFilter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("trioengine").setLevel(level.upper())


def log_what_python_prints() -> None:
    """Log warnings, and exceptions that nothing caught, instead of printing them to stderr."""
    logging.captureWarnings(True)
    logger = logging.getLogger("trioengine")

    def uncaught(kind: type[BaseException], error: BaseException | None, where: object) -> None:
        info = None if error is None else (kind, error, error.__traceback__)
        logger.error("%s in %s", kind.__name__, where, exc_info=info)

    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.thread)
    sys.unraisablehook = lambda args: uncaught(args.exc_type, args.exc_value, args.object)
    sys.excepthook = lambda kind, error, _: uncaught(kind, error, "the main thread")


class TextFormatter(logging.Formatter):
    """Writes a line with its context in brackets, then the lines of a traceback. All of it is printable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        about = [f"{name}={value}" for name in CONTEXT if (value := getattr(record, name, None)) is not None]
        return printable(super().formatMessage(record) + (f" [{' '.join(about)}]" if about else ""))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return printable_lines(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """Writes one JSON object on one line: time, level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        time, names = datetime.fromtimestamp(record.created, UTC), (*CONTEXT, *FIELDS, *LOSS_FIELDS)
        fields = {name: value for name in names if (value := getattr(record, name, None)) is not None}
        exception = self.formatException(record.exc_info) if record.exc_info else None
        return json_record(time, record.levelname.lower(), record.name, record.getMessage(), fields, exception)


logger = logging.getLogger("trioengine.worker")
END_TIMEOUT = 1.0  # seconds to read the last lines of a worker that has ended
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_CHUNK = 1 << 16  # bytes; a longer line is logged in pieces


@asynccontextmanager
async def logged_workers() -> AsyncIterator[Ports]:
    """Ports whose workers write to the log; leaving the block waits for their last lines, a second at most."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    reading = trio.CancelScope(shield=True)
    async with open_unwrapped_nursery() as nursery:
        nursery.start_soon(_log_lines, trio.lowlevel.FdStream(readable), reading)
        try:
            yield Ports(spawn_worker=partial(spawn_worker, stderr=writable))
        finally:
            os.close(writable)
            reading.deadline = trio.current_time() + END_TIMEOUT


async def _log_lines(stream: trio.abc.ReceiveStream, reading: trio.CancelScope) -> None:
    rest = b""
    with reading:
        async with stream:
            while data := await stream.receive_some(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _CHUNK:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    _log(line)
    _log(rest)


def _log(line: bytes) -> None:
    """Log a line at the level that the worker's logging put before it; a line of a library is a warning."""
    text = line.decode("utf-8", "backslashreplace").rstrip()
    level, _, message = text.partition(": ")
    if level in _LEVELS:
        logger.log(_LEVELS[level], "%s", message)
    elif text:
        logger.warning("%s", text)
