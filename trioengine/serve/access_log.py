"""A line of the log for each request, and the id by which it is found: never its contents, its query or its headers."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioengine.serve.http import BadRequest, HttpConnection, Request
from trioengine.serve.log_fields import REQUEST_ID, SESSION

logger = logging.getLogger("trioengine.access")
FIELDS = ("method", "path", "status", "milliseconds")  # of a record, beside those of the context
HEADER = b"x-request-id"
PROBES = {"/health": (200, 503), "/ready": (200, 503), "/metrics": (200,)}  # with these statuses logged at debug
_USABLE = re.compile(rb"(?:(?![][(){}<>=\"'`])[!-~]){1,128}")  # in a line of the log, none looks like more than itself
_UNREADABLE = Request("-", "-", "", ())
_MAX_PATH = 200  # characters


def request_id(request: Request) -> str:
    """The client's own, or a new one if it has none that can be used."""
    given = request.header(HEADER)
    return given.decode() if given is not None and _USABLE.fullmatch(given) else f"req_{secrets.token_hex(12)}"


@contextmanager
def logged(connection: HttpConnection, request: Request) -> Iterator[None]:
    """Within, the request is served: records and the response carry its id. A line when that is over."""
    id = request_id(request)
    REQUEST_ID.set(id)  # until the connection's next one: what ends the connection is about this one
    SESSION.set(None)
    connection.common_headers = ((HEADER, id.encode()),)
    began = trio.current_time()
    refused = None
    try:
        yield
    except BadRequest as exc:
        refused = exc.response.status
        raise
    finally:
        status = connection.status or refused or "-"  # the client left before it was told one
        milliseconds = round(1000 * (trio.current_time() - began), 1)
        values = (request.method[:16], request.path[:_MAX_PATH], status, milliseconds)
        fields = dict(zip(FIELDS, values, strict=True))
        level = logging.DEBUG if status in PROBES.get(request.path, ()) else logging.INFO
        logger.log(level, "%(method)s %(path)s %(status)s %(milliseconds)s ms", fields, extra=fields)


@contextmanager
def logged_if_unreadable(connection: HttpConnection) -> Iterator[None]:
    """Within, a request's head is read. If it is refused, it is logged as one that says nothing."""
    try:
        yield
    except BadRequest:
        with logged(connection, _UNREADABLE):
            raise
