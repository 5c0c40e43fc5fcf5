"""What the records of the log are about, beside their message: which request, session and client.

Tasks inherit it from the one that starts them.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

from trioengine.core.bounds import excerpt
from trioengine.serve.errors import Problem
from trioengine.serve.http import BadRequest, HttpConnection, Request

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


logger = logging.getLogger("trioengine.access")
ERROR_FIELDS = ("error_type", "error_code", "error_message")
FIELDS = ("method", "path", "status", "milliseconds", *ERROR_FIELDS)  # of a record, beside those of the context
HEADER = b"x-request-id"
PROBES = {"/health": (200, 503), "/ready": (200, 503), "/metrics": (200,)}  # with these statuses logged at debug
_USABLE = re.compile(rb"(?:(?![][(){}<>=\"'`])[!-~]){1,128}")  # in a line of the log, none looks like more than itself
_UNREADABLE = Request("-", "-", "", ())
_MAX_PATH = 200  # characters
_MAX_MESSAGE = 400
_QUOTED = re.compile(r"(, got | says: |(?<=unknown parameter) ').*", re.DOTALL)  # the end of a message that quotes the
# request: a value, or a name in its query


def request_id(request: Request) -> str:
    """The client's own, or a new one if it has none that can be used."""
    given = request.header(HEADER)
    return given.decode() if given is not None and _USABLE.fullmatch(given) else f"req_{secrets.token_hex(12)}"


@contextmanager
def logged(connection: HttpConnection, request: Request) -> Iterator[None]:
    """Within, the request is served: records and the response carry its id. A line when that is over.

    Of a refused or failed request the line has the error, without the values that its message quotes.
    """
    id = request_id(request)
    REQUEST_ID.set(id)  # until the connection's next one: what ends the connection is about this one
    SESSION.set(None)
    connection.common_headers = ((HEADER, id.encode()),)
    began = trio.current_time()
    refused = None
    try:
        yield
    except BadRequest as exc:
        refused = exc.response
        raise
    finally:
        answer = connection if connection.status is not None or refused is None else refused
        _log(request, answer.status, answer.problem, trio.current_time() - began)


def _log(request: Request, status: int | None, problem: Problem | None, seconds: float) -> None:
    """`status` is None if the client left before it got one."""
    shown = "-" if status is None else status
    values = (request.method[:16], request.path[:_MAX_PATH], shown, round(1000 * seconds, 1), *_error_of(problem))
    fields = dict(zip(FIELDS, values, strict=False))
    line = "%(method)s %(path)s %(status)s %(milliseconds)s ms"
    if problem is not None:
        line += ": %(error_code)s: %(error_message)s"
    logger.log(logging.DEBUG if status in PROBES.get(request.path, ()) else logging.INFO, line, fields, extra=fields)


def _error_of(problem: Problem | None) -> tuple[str, ...]:
    """The values of ERROR_FIELDS, without the value that the message quotes; names of models and fields stay."""
    if problem is None:
        return ()
    return problem.type, problem.code, excerpt(_QUOTED.sub("", problem.message), _MAX_MESSAGE)


@contextmanager
def logged_if_unreadable(connection: HttpConnection) -> Iterator[None]:
    """Within, a request's head is read. If it is refused, it is logged as one that says nothing."""
    try:
        yield
    except BadRequest:
        with logged(connection, _UNREADABLE):
            raise
