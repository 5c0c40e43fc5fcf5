"""The fields of log records. Tasks inherit `request_id`, `session` and `client` from the task that starts them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
SESSION: ContextVar[str | None] = ContextVar("session", default=None)
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
_VARIABLES = (REQUEST_ID, SESSION, CLIENT)
CONTEXT = tuple(variable.name for variable in _VARIABLES)  # fields of every record
ERROR_FIELDS = ("error_type", "error_code", "error_message")
FIELDS = ("method", "path", "status", "milliseconds", *ERROR_FIELDS)  # more fields of an access log's record


@contextmanager
def set_field(variable: ContextVar[str | None], value: str | None) -> Iterator[None]:
    """Set a field of this task's log records within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class ContextFilter(logging.Filter):
    """Adds the fields `request_id`, `session` and `client` to each record that passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        for variable in _VARIABLES:
            setattr(record, variable.name, variable.get())
        return True
