"""The access log: one line for each request, without its contents, query or headers.

Each request has an id, the client's own or a new one, by which its records and its response are found.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioengine.core.wording import excerpt
from trioengine.serve.errors import Problem
from trioengine.serve.http import BadRequest, HttpRequest
from trioengine.serve.http_connection import HttpConnection
from trioengine.serve.ids import new_id
from trioengine.serve.log_fields import FIELDS, REQUEST_ID, SESSION

logger = logging.getLogger("trioengine.access")
HEADER = b"x-request-id"
PROBES = {"/health": (200, 503), "/ready": (200, 503), "/metrics": (200,)}  # with these statuses logged at debug
_USABLE = re.compile(rb"(?:(?![][(){}<>=\"'`])[!-~]){1,128}")  # an id that cannot be taken for another part of a line
_UNREADABLE = HttpRequest("-", "-", "", ())
_MAX_PATH = 200  # characters
_MAX_MESSAGE = 400
# the end of a message that quotes the request: a value, or a name in its query
_QUOTED = re.compile(r"(, got | raised: |(?<=unknown parameter) ').*", re.DOTALL)


def request_id(request: HttpRequest) -> str:
    """Return the client's id of the request, or a new one if it has none, or an unusable one."""
    given = request.header(HEADER)
    return given.decode() if given is not None and _USABLE.fullmatch(given) else new_id("req_")


@contextmanager
def log_request(connection: HttpConnection, request: HttpRequest) -> Iterator[None]:
    """Log the request that the block serves, once it is over; records and the response carry its id.

    The line of a refused or failed request has the error, without the values that its message quotes.
    """
    id = request_id(request)
    REQUEST_ID.set(id)  # until the connection's next request: the end of the connection is logged with this one
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
        sent = connection if connection.status is not None or refused is None else refused
        _log(request, sent.status, sent.problem, trio.current_time() - began)


@contextmanager
def log_unreadable(connection: HttpConnection) -> Iterator[None]:
    """Log a request whose head, read within the block, is refused: its method and path are unknown."""
    try:
        yield
    except BadRequest:
        with log_request(connection, _UNREADABLE):
            raise


def _log(request: HttpRequest, status: int | None, problem: Problem | None, seconds: float) -> None:
    """`status` is None if the client disconnected before its response."""
    level = logging.DEBUG if status in PROBES.get(request.path, ()) else logging.INFO
    if not logger.isEnabledFor(level):
        return
    shown = "-" if status is None else status
    values = (request.method[:16], request.path[:_MAX_PATH], shown, round(1000 * seconds, 1), *_error_values(problem))
    fields = dict(zip(FIELDS, values, strict=False))
    line = "%(method)s %(path)s %(status)s %(milliseconds)s ms"
    if problem is not None:
        line += ": %(error_code)s: %(error_message)s"
    logger.log(level, line, fields, extra=fields)


def _error_values(problem: Problem | None) -> tuple[str, ...]:
    """Return the values of ERROR_FIELDS, without the value that the message quotes; names of fields stay."""
    if problem is None:
        return ()
    return problem.type, problem.code, excerpt(_QUOTED.sub("", problem.message), _MAX_MESSAGE)
