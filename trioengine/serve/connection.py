"""Accepted connections: each is read as HTTP until it asks to become a WebSocket.

A connection takes a slot for as long as it is open. Beyond `max_connections` a few more are read up to the head of one
request, so that probes and operators are served then as well; others are refused with 503.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import trio
from trio_websocket import ConnectionClosed
from wsproto.utilities import ProtocolError

from trioengine.core.errors import EngineOverloaded
from trioengine.serve.access_log import log_request, log_unreadable
from trioengine.serve.auth import Access, Caller, Role
from trioengine.serve.body import CHUNK, DisconnectCounter, Disconnected, log_disconnect
from trioengine.serve.config import ConnectionLimits
from trioengine.serve.errors import SERVER_ERROR, ClientError, Problem
from trioengine.serve.http import (
    BadRequest,
    Handler,
    HttpRequest,
    HttpResponse,
    StreamingResponse,
    error_response,
    problem_response,
)
from trioengine.serve.http_connection import HttpConnection, Waiting
from trioengine.serve.ids import http_date
from trioengine.serve.limits import ByteBudget, ConnectionSlot, ConnectionSlots, Displaced, Held, network_of
from trioengine.serve.listening import format_address
from trioengine.serve.log_fields import CLIENT, REQUEST_ID, SESSION, set_fields
from trioengine.serve.realtime.handshake import resumes
from trioengine.serve.routes import REALTIME, Routes, find_handler, find_route, upgrade_required
from trioengine.serve.tls import TlsStream
from trioengine.serve.websocket import AcceptedWebSocket

logger = logging.getLogger("trioengine")
E = TypeVar("E", bound=BaseException)
_DISCONNECTS = (  # raised where a client disconnects, or is made to
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
MAX_UNREAD = 64 << 10  # bytes of a body that no handler reads: its client may be without a key
SUBPROTOCOL = "realtime"
_SHOWN = 40  # bytes of a header in a message
USER_TIMEOUT = 20.0  # seconds that sent bytes may stay unacknowledged
LINGER_TIMEOUT = 2.0  # seconds
LINGER_BYTES = 8 << 20
_TCP_USER_TIMEOUT = 18  # linux/tcp.h; socket.TCP_USER_TIMEOUT exists on Linux only

CheckUpgrade = Callable[[HttpRequest, Caller], None]  # raises ClientError to refuse a WebSocket
WebSocketHandler = Callable[[AcceptedWebSocket, HttpRequest, Caller, Held], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Connection:
    """An accepted connection with its slot."""

    stream: trio.abc.Stream
    http: HttpConnection
    slot: ConnectionSlot

    def waiting_until(self, timeout: float) -> Waiting:
        """Return a function that makes the slot's context of waiting, until `timeout` seconds from now."""
        return partial(self.slot.waiting, trio.current_time() + timeout)


class ConnectionHandler:
    """Serves accepted streams: HTTP by `routes`, and WebSockets, unless `check_upgrade` refuses, by `realtime`."""

    def __init__(
        self,
        routes: Routes,
        access: Access,
        check_upgrade: CheckUpgrade,
        realtime: WebSocketHandler,
        *,
        limits: ConnectionLimits,
        takes_images: Callable[[], bool],
        disconnects: DisconnectCounter,
        budget: ByteBudget,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        root_path: str = "",
    ) -> None:
        self._root_path = root_path
        self._routes = routes
        self._tls = tls
        self._access = access
        self._check_upgrade = check_upgrade
        self._realtime = realtime
        self._limits = limits
        self._takes_images = takes_images  # False until the model is known
        self._disconnects = disconnects
        self._budget = budget
        self._slots = ConnectionSlots(max_connections)
        self._beyond = ConnectionSlots(MAX_BEYOND)
        self._idle: set[trio.CancelScope] = set()
        self._closing = False

    def close_idle(self) -> None:
        """Close the HTTP connections that wait for a request, now and from now on."""
        self._closing = True
        for scope in self._idle:
            scope.cancel()

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end, and close the stream in any case. Raises nothing but Cancelled."""
        address = network_of(peer_host(stream))
        for slots, serve in ((self._slots, self._serve_requests), (self._beyond, self._serve_beyond)):
            with slots.take(address) as slot:
                if slot is not None:
                    await self._handle(stream, partial(self._serve, slot, serve))
                    return
        await trio.aclose_forcefully(stream)

    async def _handle(self, stream: trio.abc.Stream, serve: Callable[[trio.abc.Stream], Awaitable[None]]) -> None:
        enable_keepalive(stream)
        with set_fields({CLIENT: peer_address(stream), REQUEST_ID: None, SESSION: None}):
            async with stream if self._tls is None else TlsStream(stream, self._tls) as stream:
                try:
                    await serve(stream)
                except* Displaced:
                    logger.debug("a connection made room for another")
                except* _DISCONNECTS as group:
                    log_disconnect(_first(group))
                except* Exception as group:
                    logger.error("a connection crashed and was closed", exc_info=group)

    async def _serve(
        self, slot: ConnectionSlot, serve: Callable[[_Connection], Awaitable[None]], stream: trio.abc.Stream
    ) -> None:
        if isinstance(stream, TlsStream) and not await self._shake_hands(stream, slot):
            return
        connection = _Connection(stream, HttpConnection(stream, self._limits), slot)
        try:
            await serve(connection)
        except* BadRequest as group:
            await connection.http.refuse(_first(group).response)
            with slot.lingering():
                await linger(stream)

    async def _shake_hands(self, stream: TlsStream, slot: ConnectionSlot) -> bool:
        """Shake hands for TLS, and return whether the client has; a new connection may displace this one."""
        with suppress(trio.TooSlowError), self._waiting_idle(slot, self._limits.handshake_timeout):
            if not self._closing:
                await stream.do_handshake()
                return True
        return False

    @contextmanager
    def _waiting_idle(self, slot: ConnectionSlot, timeout: float) -> Iterator[None]:
        """Wait for the client in the block; raises TooSlowError also when `close_idle` is called."""
        with slot.waiting(trio.current_time() + timeout) as scope:
            self._idle.add(scope)
            try:
                yield
            finally:
                self._idle.discard(scope)

    async def _serve_requests(self, connection: _Connection) -> None:
        while (request := await self._next_request(connection)) is not None:
            with self._logging(connection.http, request):
                if not await self._serve_request(connection, request):
                    break

    async def _serve_beyond(self, connection: _Connection) -> None:
        """Serve one request of a connection beyond the limit: a probe or an operator's. Others are refused with 503."""
        with trio.move_on_after(BEYOND_TIMEOUT) as scope:
            request = await self._next_request(connection)
        if scope.cancelled_caught:
            with log_unreadable(connection.http):
                raise self._too_many_connections()
        if request is None:
            return
        with self._logging(connection.http, request, (b"connection", b"close")):
            route = find_route(self._routes, request.path)
            if route is None or not (request.path in PROBES or route.role is Role.OPERATOR):
                raise self._too_many_connections()
            await self._serve_request(connection, request)

    def _too_many_connections(self) -> BadRequest:
        message = f"connection limit reached ({self._slots.count})"
        return BadRequest(problem_response(503, Problem(SERVER_ERROR, "too_many_connections", message, retry_after=1)))

    @contextmanager
    def _logging(self, http: HttpConnection, request: HttpRequest, *headers: tuple[bytes, bytes]) -> Iterator[None]:
        """Log the request that the block serves; its response gets the headers for its origin, and `headers`."""
        with log_request(http, request):
            http.common_headers += (*self._access.origins.headers(request), *headers)
            yield

    # ---- one request ----------------------------------------------------------------------------------------------

    async def _next_request(self, connection: _Connection) -> HttpRequest | None:
        """Read the head of the next request; None at the end of the connection. Raises Displaced, BadRequest."""
        http, limits = connection.http, self._limits
        try:
            with self._waiting_idle(connection.slot, limits.handshake_timeout if http.is_new else limits.idle_timeout):
                if self._closing or not await http.wait_for_request():
                    return None
        except trio.TooSlowError:
            return None
        with log_unreadable(http):
            return self._without_root(await http.next_head(connection.waiting_until(limits.handshake_timeout)))

    def _without_root(self, request: HttpRequest | None) -> HttpRequest | None:
        """Return the request with the path of its route: a proxy may have left the prefix in it."""
        if request is None or not self._root_path or find_route(self._routes, request.path) is not None:
            return request
        if not f"{request.path}/".startswith(f"{self._root_path}/"):
            return request
        return dataclasses.replace(request, path=request.path.removeprefix(self._root_path) or "/")

    async def _serve_request(self, connection: _Connection, request: HttpRequest) -> bool:
        """Serve a request, or the WebSocket that it asks for; True if another may follow. Raises BadRequest."""
        route = find_route(self._routes, request.path)
        preflight = self._access.origins.preflight(request, () if route is None else route.handlers)
        role = Role.ANYONE if preflight else Role.USER if route is None else route.role
        is_websocket = request.wants_websocket and request.path == REALTIME
        num_sessions = 0 if is_websocket and resumes(request) else 1
        with self._access.admit(request, role, num_sessions) as caller, self._budget.holding(caller.key) as held:
            if is_websocket:
                await self._serve_websocket(connection, request, caller, held)
                return False
            request = dataclasses.replace(request, cache_salt=caller.cache_salt, sessions=caller.sessions)
            found = preflight or find_handler(self._routes, request)
            return await self._exchange(connection, request, found, held)

    async def _exchange(
        self, connection: _Connection, request: HttpRequest, found: Handler | HttpResponse, held: Held
    ) -> bool:
        async def handler(request: HttpRequest) -> HttpResponse | StreamingResponse:
            return found if isinstance(found, HttpResponse) else await found(request)

        max_size = self._limits.largest_body(takes_images=self._takes_images())
        if isinstance(found, HttpResponse) or request.method != "POST":
            max_size = min(max_size, MAX_UNREAD)
        with self._disconnects.counting():
            return await connection.http.exchange(await self._with_body(connection, request, max_size, held), handler)

    async def _with_body(self, connection: _Connection, request: HttpRequest, max_size: int, held: Held) -> HttpRequest:
        """Read the body. The caller keeps no reference to the result, so that the handler can drop it."""
        if request.is_encoded:
            raise _unsupported_encoding(request)
        waiting = connection.waiting_until(self._limits.body_timeout)
        try:
            body = await connection.http.read_body(max_size, held, waiting)
            return dataclasses.replace(request, body=body, held=held)
        except trio.TooSlowError:
            message = f"the body did not come within {self._limits.body_timeout:g} s"
            raise BadRequest.of(408, "request_timeout", message) from None

    # ---- WebSockets -----------------------------------------------------------------------------------------------

    async def _serve_websocket(self, connection: _Connection, request: HttpRequest, caller: Caller, held: Held) -> None:
        websocket = AcceptedWebSocket(connection.stream, self._largest_message, held, connection.slot.lingering)
        refusal = _bad_handshake(request, connection.http.seen, websocket) or self._bad_upgrade(request, caller)
        if refusal is not None:
            raise BadRequest(refusal)
        async with trio.open_nursery() as nursery:
            with trio.fail_after(self._limits.handshake_timeout):
                proposal = await websocket.open(nursery)
                subprotocol = SUBPROTOCOL if SUBPROTOCOL in proposal.proposed_subprotocols else None
                headers = [*connection.http.common_headers, (b"date", http_date())]
                await proposal.accept(subprotocol=subprotocol, extra_headers=headers)
                connection.http.status = 101
            await self._realtime(websocket, request, caller, held)
            nursery.cancel_scope.cancel()
        with connection.slot.lingering():
            await linger(connection.stream)

    def _largest_message(self) -> int:
        return self._limits.largest_message(takes_images=self._takes_images())

    def _bad_upgrade(self, request: HttpRequest, caller: Caller) -> HttpResponse | None:
        try:
            self._check_upgrade(request, caller)
        except (ClientError, EngineOverloaded) as exc:
            return error_response(exc)
        return None


def _bad_handshake(request: HttpRequest, seen: bytes, websocket: AcceptedWebSocket) -> HttpResponse | None:
    """Return the response that refuses a malformed handshake; None if the WebSocket has taken it.

    A handshake that wsproto refuses here would make trio-websocket wait indefinitely, or crash.
    """
    if request.has_body or request.http_version < b"1.1":  # proxies on the way would not see a WebSocket
        return BadRequest.of(400, "bad_request", "a WebSocket's handshake is HTTP/1.1, and has no body").response
    try:
        websocket.receive_handshake(seen)
        key = base64.b64decode(request.header(b"sec-websocket-key") or b"", validate=True)
    except UnicodeError:
        return BadRequest.of(400, "bad_request", "the handshake's headers must be ASCII").response
    except (ProtocolError, ValueError):
        return upgrade_required()
    return None if len(key) == 16 else upgrade_required()


def _unsupported_encoding(request: HttpRequest) -> BadRequest:
    shown = (request.header(b"content-encoding") or b"")[:_SHOWN].decode("ascii", "backslashreplace")
    message = f"a body with the Content-Encoding {shown!r} is not supported: send the body as it is"
    response = BadRequest.of(415, "unsupported_encoding", message).response
    return BadRequest(dataclasses.replace(response, headers=((b"accept-encoding", b"identity"),)))


# ---- sockets ------------------------------------------------------------------------------------------------------


def enable_keepalive(stream: trio.abc.Stream) -> None:
    """Let the kernel detect a peer that has vanished without closing the connection."""
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(USER_TIMEOUT * 1000))


def peer_address(stream: trio.abc.Stream) -> str | None:
    """Return host and port of the other end; None for a stream without an address."""
    if not isinstance(stream, trio.SocketStream):
        return None
    try:
        name = stream.socket.getpeername()
    except OSError:  # it is gone already
        return None
    return format_address(*name[:2]) if isinstance(name, tuple) else None  # a Unix socket has a path


def peer_host(stream: trio.abc.Stream) -> str | None:
    """Return the other end's address without its port; None for a stream without an address."""
    address = peer_address(stream)
    return None if address is None else address.rpartition(":")[0].strip("[]")


async def linger(stream: trio.abc.Stream) -> None:
    """Send the end of the stream and read for a while: closing with unread bytes would reset, and lose the response."""
    if not isinstance(stream, trio.abc.HalfCloseableStream):
        return
    with trio.move_on_after(LINGER_TIMEOUT), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_eof()
        received = 0
        while received < LINGER_BYTES and (data := await stream.receive_some(CHUNK)):
            received += len(data)


def _first(group: BaseExceptionGroup[E]) -> E:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cast("E", error)
