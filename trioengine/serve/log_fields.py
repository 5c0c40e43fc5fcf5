"""The fields of log records. Tasks inherit `request_id`, `session` and `client` from the task that starts them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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
def set_fields(values: Mapping[ContextVar[str | None], str | None]) -> Iterator[None]:
    """Set fields of this task's log records within the block."""
    tokens = [(variable, variable.set(value)) for variable, value in values.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


class ContextFilter(logging.Filter):
    """Adds the fields `request_id`, `session` and `client` to each record that passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        for variable in _VARIABLES:
            setattr(record, variable.name, variable.get())
        return True
