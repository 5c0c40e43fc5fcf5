"""What the records of the log are about, beside their message: which request, session and client.

Tasks inherit it from the one that starts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
SESSION: ContextVar[str | None] = ContextVar("session", default=None)
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
_VARIABLES = (REQUEST_ID, SESSION, CLIENT)
CONTEXT = tuple(variable.name for variable in _VARIABLES)


@contextmanager
def about(variable: ContextVar[str | None], value: str | None) -> Iterator[None]:
    """Within, this task's records say so."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class ContextFilter(logging.Filter):
    """Gives each record that passes the fields `request_id`, `session` and `client`."""

    def filter(self, record: logging.LogRecord) -> bool:
        for variable in _VARIABLES:
            setattr(record, variable.name, variable.get())
        return True
