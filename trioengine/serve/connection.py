"""The front door: one port, on which each connection is read as HTTP until it asks to become a WebSocket."""

from __future__ import annotations

import base64
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import trio
from trio_websocket import ConnectionClosed
from wsproto.utilities import ProtocolError

from trioengine.serve.access_log import CLIENT, REQUEST_ID, SESSION, about, logged, logged_if_unreadable
from trioengine.serve.auth import Access
from trioengine.serve.body import (
    Departures,
    Disconnected,
    StreamingResponse,
    guard,
    host_of,
    linger,
    log_disconnect,
    peer,
)
from trioengine.serve.config import ConnectionLimits
from trioengine.serve.errors import INVALID_REQUEST, SERVER_ERROR, ClientError, Problem
from trioengine.serve.http import (
    BadRequest,
    Handler,
    HttpConnection,
    Request,
    Response,
    error_response,
    problem_response,
)
from trioengine.serve.limits import ByteBudget, Displaced, Held, Place, Places, network_of
from trioengine.serve.routes import REALTIME, Role, Routes, find, route_of, upgrade_required
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
MAX_BEYOND = 16  # connections beyond the limit that are read up to a request's head, at a time
BEYOND_TIMEOUT = 2.0  # seconds for the head of such a request
PROBES = ("/health", "/ready")  # answered also beyond the limit, as operators are
MAX_UNREAD = 64 << 10  # bytes of a body that no handler looks at: it may come from whoever has no key
SUBPROTOCOL = "realtime"

CheckUpgrade = Callable[[Request], None]  # raises ClientError
WebSocketHandler = Callable[[AcceptedWebSocket, Held, bytes], Awaitable[None]]  # and the cache salt of its key


@dataclass(frozen=True, slots=True)
class _Guest:
    """An accepted connection, and the place that it has."""

    stream: trio.abc.Stream
    http: HttpConnection
    place: Place


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
        takes_images: Callable[[], bool],
        departures: Departures,
        budget: ByteBudget,
        max_connections: int,
    ) -> None:
        self._routes = routes
        self._access = access
        self._check_upgrade = check_upgrade
        self._realtime = realtime
        self._limits = limits
        self._takes_images = takes_images  # the model, as far as it is known
        self._departures = departures
        self._budget = budget
        self._places = Places(max_connections)
        self._beyond = Places(MAX_BEYOND)
        self._idle: set[trio.CancelScope] = set()
        self._closing = False

    def close_idle(self) -> None:
        """Close the HTTP connections that wait for a request, now and from now on."""
        self._closing = True
        for scope in self._idle:
            scope.cancel()

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end. Nothing but cancellation comes out; the stream is closed in any case."""
        address = network_of(host_of(stream))
        for places, serve in ((self._places, self._serve_requests), (self._beyond, self._serve_beyond)):
            with places.take(address) as place:
                if place is not None:
                    await self._handle(stream, partial(self._serve, place, serve))
                    return
        await trio.aclose_forcefully(stream)

    async def _handle(self, stream: trio.abc.Stream, serve: Callable[[trio.abc.Stream], Awaitable[None]]) -> None:
        guard(stream)
        with about(CLIENT, peer(stream)), about(REQUEST_ID, None), about(SESSION, None):
            async with stream:
                try:
                    await serve(stream)
                except* Displaced:
                    logger.debug("a connection made room for another")
                except* _LEAVING as group:
                    log_disconnect(_first(group))
                except* Exception as group:
                    logger.error("a connection crashed and was closed", exc_info=group)

    async def _serve(self, place: Place, serve: Callable[[_Guest], Awaitable[None]], stream: trio.abc.Stream) -> None:
        guest = _Guest(stream, HttpConnection(stream, self._limits), place)
        try:
            await serve(guest)
        except* BadRequest as group:
            await guest.http.refuse(_first(group).response)
            with place.lingering():
                await linger(stream)

    async def _serve_requests(self, guest: _Guest) -> None:
        while (request := await self._next_request(guest)) is not None:
            with self._serving(guest, request):
                if not await self._serve_request(guest, request):
                    break

    async def _serve_beyond(self, guest: _Guest) -> None:
        """Serve one request of a connection beyond the limit: a probe or an operator's. Others are refused with 503."""
        with trio.move_on_after(BEYOND_TIMEOUT) as scope:
            request = await self._next_request(guest)
        if scope.cancelled_caught:
            with logged_if_unreadable(guest.http):
                raise self._no_place()
        if request is None:
            return
        with self._serving(guest, request, (b"connection", b"close")):
            route = route_of(self._routes, request.path)
            if route is None or not (request.path in PROBES or route.role is Role.OPERATOR):
                raise self._no_place()
            await self._serve_request(guest, request)

    @contextmanager
    def _serving(self, guest: _Guest, request: Request, *more: tuple[bytes, bytes]) -> Iterator[None]:
        """Within, the request is served and logged; its response has these headers, and those for its origin."""
        with logged(guest.http, request):
            guest.http.common_headers += (*self._access.origins.headers(request), *more)
            yield

    def _no_place(self) -> BadRequest:
        message = f"connection limit reached ({self._places.count})"
        return BadRequest(problem_response(503, Problem(SERVER_ERROR, "too_many_connections", message, retry_after=1)))

    async def _serve_request(self, guest: _Guest, request: Request) -> bool:
        """True if another request may follow. Raises BadRequest."""
        route = route_of(self._routes, request.path)
        preflight = self._access.origins.preflight(request, () if route is None else route.handlers)
        role = Role.USER if route is None else route.role
        with (
            self._access.admit(request, Role.ANYONE if preflight else role) as caller,
            self._budget.holding(caller.key) as held,
        ):
            request = dataclasses.replace(request, cache_salt=caller.cache_salt)
            if not (request.wants_websocket and request.path == REALTIME):
                return await self._exchange(guest, request, preflight or find(self._routes, request), held)
            websocket = AcceptedWebSocket(guest.stream, self._largest_message, held)
            refusal = _bad_handshake(request, guest.http.seen, websocket) or self._bad_upgrade(request)
            if refusal is not None:
                raise BadRequest(refusal)
            await self._become_websocket(guest.http, websocket, held, caller.cache_salt)
            with guest.place.lingering():
                await linger(guest.stream)
            return False

    def _largest_message(self) -> int:
        return self._limits.largest_message(takes_images=self._takes_images())

    async def _next_request(self, guest: _Guest) -> Request | None:
        """The head of the next request; None to close. Raises Displaced when the place is needed."""
        with guest.place.waiting():
            return await self._read_head(guest.http)

    async def _read_head(self, connection: HttpConnection) -> Request | None:
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

    async def _exchange(self, guest: _Guest, request: Request, found: Handler | Response, held: Held) -> bool:
        async def handler(request: Request) -> Response | StreamingResponse:
            return found if isinstance(found, Response) else await found(request)

        max_size = self._limits.largest_body(takes_images=self._takes_images())
        if isinstance(found, Response) or request.method != "POST":
            max_size = min(max_size, MAX_UNREAD)
        with self._departures.counted():
            return await guest.http.exchange(await self._with_body(guest, request, max_size, held), handler)

    async def _with_body(self, guest: _Guest, request: Request, max_size: int, held: Held) -> Request:
        """Not kept by the caller: it is the handler's to let go."""
        with guest.place.waiting(), trio.move_on_after(self._limits.body_timeout):
            return dataclasses.replace(request, body=await guest.http.read_body(max_size, held), held=held)
        message = f"the body did not come within {self._limits.body_timeout:g} s"
        raise BadRequest(problem_response(408, Problem(INVALID_REQUEST, "request_timeout", message)))

    async def _become_websocket(
        self, connection: HttpConnection, websocket: AcceptedWebSocket, held: Held, cache_salt: bytes
    ) -> None:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(self._limits.handshake_timeout):
                proposal = await websocket.open(nursery)
                subprotocol = SUBPROTOCOL if SUBPROTOCOL in proposal.proposed_subprotocols else None
                headers = list(connection.common_headers)
                await proposal.accept(subprotocol=subprotocol, extra_headers=headers)
                connection.status = 101
            await self._realtime(websocket, held, cache_salt)
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
