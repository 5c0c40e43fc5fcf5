"""The front door: one port, on which each connection is read as HTTP until it asks to become a WebSocket."""

from __future__ import annotations

import base64
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import trio
from trio_websocket import ConnectionClosed
from wsproto.utilities import ProtocolError

from trioengine.core.serve_config import ConnectionLimits
from trioengine.serve.access import Access
from trioengine.serve.access_log import logged, logged_if_unreadable
from trioengine.serve.departures import Departures, log_disconnect
from trioengine.serve.http import (
    BadRequest,
    Handler,
    HttpConnection,
    Request,
    Response,
    error_response,
    problem_response,
)
from trioengine.serve.log_fields import CLIENT, REQUEST_ID, SESSION, about
from trioengine.serve.problem import INVALID_REQUEST, SERVER_ERROR, ClientError, Problem
from trioengine.serve.routes import REALTIME, Role, Routes, find, route_of, upgrade_required
from trioengine.serve.sockets import guard, linger, peer
from trioengine.serve.streaming import Disconnected, StreamingResponse
from trioengine.serve.websocket import AcceptedWebSocket

logger = logging.getLogger("trioengine")
E = TypeVar("E", bound=BaseException)
_LEAVING = (  # raised where a client leaves, or is made to leave
    Disconnected,
    ConnectionClosed,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
    ProtocolError,
)
MAX_REFUSALS = 16  # connections that are told that they are too many, at a time; others are closed without a word
MAX_UNREAD = 64 << 10  # bytes of a body that no handler looks at: it may come from whoever has no key
SUBPROTOCOL = "realtime"

CheckUpgrade = Callable[[Request], None]  # raises ClientError
WebSocketHandler = Callable[[AcceptedWebSocket], Awaitable[None]]


class _Places:
    """So many connections at a time, each from its acceptance until it is closed."""

    def __init__(self, count: int) -> None:
        self.left = count

    @contextmanager
    def take(self) -> Iterator[None]:
        self.left -= 1
        try:
            yield
        finally:
            self.left += 1


class FrontDoor:
    """Serves accepted streams. `check_upgrade` may refuse a WebSocket, `realtime` gets those it does not."""

    def __init__(
        self,
        routes: Routes,
        access: Access,
        check_upgrade: CheckUpgrade,
        realtime: WebSocketHandler,
        *,
        limits: ConnectionLimits,
        departures: Departures,
        max_connections: int,
    ) -> None:
        self._routes = routes
        self._access = access
        self._check_upgrade = check_upgrade
        self._realtime = realtime
        self._limits = limits
        self._departures = departures
        self._max_connections = max_connections
        self._places = _Places(max_connections)
        self._refusals = _Places(MAX_REFUSALS)
        self._idle: set[trio.CancelScope] = set()
        self._closing = False

    def close_idle(self) -> None:
        """Close the HTTP connections that wait for a request, now and from now on."""
        self._closing = True
        for scope in self._idle:
            scope.cancel()

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end. Nothing but cancellation comes out; the stream is closed in any case."""
        if self._places.left:
            await self._handle(stream, self._places, self._serve)
        elif self._refusals.left:
            await self._handle(stream, self._refusals, self._turn_away)
        else:
            await trio.aclose_forcefully(stream)

    async def _handle(
        self, stream: trio.abc.Stream, places: _Places, serve: Callable[[trio.abc.Stream], Awaitable[None]]
    ) -> None:
        guard(stream)
        with places.take(), about(CLIENT, peer(stream)), about(REQUEST_ID, None), about(SESSION, None):
            async with stream:
                try:
                    await serve(stream)
                except* _LEAVING as group:
                    log_disconnect(_first(group))
                except* Exception as group:
                    logger.error("a connection crashed and was closed", exc_info=group)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        connection = HttpConnection(stream, self._limits)
        try:
            await self._serve_requests(connection, stream)
        except* BadRequest as group:
            await connection.refuse(_first(group).response)
            await linger(stream)

    async def _turn_away(self, stream: trio.abc.Stream) -> None:
        message = f"the server has {self._max_connections} connections, and takes no more"
        problem = Problem(SERVER_ERROR, "too_many_connections", message, retry_after=1.0)
        await HttpConnection(stream, self._limits).refuse(problem_response(503, problem))
        await linger(stream)

    async def _serve_requests(self, connection: HttpConnection, stream: trio.abc.Stream) -> None:
        while (request := await self._next_request(connection)) is not None:
            with logged(connection, request):
                connection.common_headers += self._access.origins.headers(request)
                if not await self._serve_request(connection, stream, request):
                    break

    async def _serve_request(self, connection: HttpConnection, stream: trio.abc.Stream, request: Request) -> bool:
        """True if another request may follow. Raises BadRequest."""
        route = route_of(self._routes, request.path)
        preflight = self._access.origins.preflight(request, () if route is None else route.handlers)
        role = Role.USER if route is None else route.role
        with self._access.admit(request, Role.ANYONE if preflight else role):
            if not (request.wants_websocket and request.path == REALTIME):
                return await self._exchange(connection, request, preflight or find(self._routes, request))
            websocket = AcceptedWebSocket(stream, self._limits.max_message_size)
            refusal = _bad_handshake(request, connection.seen, websocket) or self._bad_upgrade(request)
            if refusal is not None:
                raise BadRequest(refusal)
            await self._become_websocket(connection, websocket)
            await linger(stream)
            return False

    async def _next_request(self, connection: HttpConnection) -> Request | None:
        """The head of the next request; None to close."""
        idle = trio.move_on_after(self._limits.handshake_timeout if connection.is_new else self._limits.idle_timeout)
        self._idle.add(idle)
        try:
            with idle:
                if self._closing or not await connection.begun():
                    return None
        finally:
            self._idle.discard(idle)
        if idle.cancelled_caught:
            return None
        with trio.fail_after(self._limits.handshake_timeout), logged_if_unreadable(connection):
            return await connection.next_head()

    def _bad_upgrade(self, request: Request) -> Response | None:
        """Why this may not become a WebSocket, if so."""
        try:
            self._check_upgrade(request)
        except ClientError as exc:
            return error_response(exc)
        return None

    async def _exchange(self, connection: HttpConnection, request: Request, found: Handler | Response) -> bool:
        async def handler(request: Request) -> Response | StreamingResponse:
            return found if isinstance(found, Response) else await found(request)

        max_size = self._limits.max_body_size
        if isinstance(found, Response) or request.method != "POST":
            max_size = min(max_size, MAX_UNREAD)
        with self._departures.counted():
            return await connection.exchange(await self._with_body(connection, request, max_size), handler)

    async def _with_body(self, connection: HttpConnection, request: Request, max_size: int) -> Request:
        """Not kept by the caller: it is the handler's to let go."""
        with trio.move_on_after(self._limits.body_timeout):
            return dataclasses.replace(request, body=await connection.read_body(max_size))
        message = f"the body did not come within {self._limits.body_timeout:g} s"
        raise BadRequest(problem_response(408, Problem(INVALID_REQUEST, "request_timeout", message)))

    async def _become_websocket(self, connection: HttpConnection, websocket: AcceptedWebSocket) -> None:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(self._limits.handshake_timeout):
                proposal = await websocket.open(nursery)
                subprotocol = SUBPROTOCOL if SUBPROTOCOL in proposal.proposed_subprotocols else None
                headers = list(connection.common_headers)
                await proposal.accept(subprotocol=subprotocol, extra_headers=headers)
                connection.status = 101
            await self._realtime(websocket)
            nursery.cancel_scope.cancel()


def _bad_handshake(request: Request, seen: bytes, websocket: AcceptedWebSocket) -> Response | None:
    """Why this cannot become a WebSocket, if so; else it has read what was seen of it.

    What wsproto refuses here would make trio-websocket wait for ever, or crash.
    """
    if request.has_body or request.http_version < b"1.1":  # others on the way would see no WebSocket in what follows
        message = "a WebSocket's handshake is HTTP/1.1, and has no body"
        return problem_response(400, Problem(INVALID_REQUEST, "bad_request", message))
    try:
        websocket.receive_handshake(seen)
        key = base64.b64decode(request.header(b"sec-websocket-key") or b"", validate=True)
    except UnicodeError:
        return problem_response(400, Problem(INVALID_REQUEST, "bad_request", "the handshake's headers must be ASCII"))
    except (ProtocolError, ValueError):
        return upgrade_required()
    return None if len(key) == 16 else upgrade_required()


def _first(group: BaseExceptionGroup[E]) -> E:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cast("E", error)
