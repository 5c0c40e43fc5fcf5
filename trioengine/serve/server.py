"""The server: an engine and the connections of its clients, from the first to the last."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.ports import Ports
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError, InvalidConfig
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import Cause
from trioengine.core.wording import brief
from trioengine.serve.admin import admin_routes
from trioengine.serve.auth import Access, is_loopback, warn_of_short_keys
from trioengine.serve.body import DisconnectCounter
from trioengine.serve.chat import OPERATION as CHAT_COMPLETIONS
from trioengine.serve.chat import ChatCompletions
from trioengine.serve.completions import OPERATION as COMPLETIONS
from trioengine.serve.completions import Completions
from trioengine.serve.config import ServeConfig
from trioengine.serve.connection import ConnectionHandler, format_address
from trioengine.serve.limits import ByteBudget, InFlight, clamp_to_fd_limit
from trioengine.serve.metrics import Metrics
from trioengine.serve.models import model_routes
from trioengine.serve.pages import pages
from trioengine.serve.realtime.connection import CLOSE_TIMEOUT
from trioengine.serve.realtime.endpoint import RealtimeEndpoint
from trioengine.serve.routes import Routes, plain_routes, post
from trioengine.serve.tls import tls_context
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.reasoning import REASONING_FORMS
from trioengine.text.tool_calls import FORMS

ABORT_TIMEOUT = 1.0  # seconds for connections to report an abort to their clients


class Server:
    """An engine that is served. `connections.handle(stream)` serves one accepted stream of any kind."""

    def __init__(self, engine: Engine, config: ServeConfig | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.engine = engine
        self.config = config = ServeConfig() if config is None else config
        self.model_name = config.served_model_name or engine.config.model
        self.scheme = "http" if config.ssl_certfile is None else "https"
        self.port = 0  # of its first socket, once it listens
        self.addresses: tuple[str, ...] = ()  # host:port of each
        self.in_flight = InFlight()
        self._disconnects = DisconnectCounter()
        self._tool_form = FORMS.get(config.tool_call_parser)  # None: auto
        self._unknown_fields = UnknownFields(refuse=config.unknown_fields == "refuse")
        self.budget = ByteBudget(config.max_buffered_bytes, config.max_buffered_bytes_per_key)
        self.metrics = Metrics(engine, self._disconnects, self.budget)
        self._closing = trio.Event()
        self.realtime = RealtimeEndpoint(
            engine,
            self.model_name,
            config,
            self._closing,
            in_flight=self.in_flight,
            budget=self.budget,
            disconnects=self._disconnects,
            unknown_fields=self._unknown_fields,
            tool_form=self._tool_form,
        )
        self.connections = ConnectionHandler(
            self._routes(),
            Access(config),
            self.realtime.check,
            self.realtime.serve,
            disconnects=self._disconnects,
            budget=self.budget,
            limits=config,
            takes_images=lambda: engine.runtime.takes_images,
            max_connections=clamp_to_fd_limit(config.max_connections),
            tls=tls,
            root_path=config.root_path,
        )
        self._accepting = trio.CancelScope()
        self._serving = trio.CancelScope()

    async def run(
        self,
        listeners: Sequence[trio.abc.Listener[Any]],
        *,
        task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and serve until `drain` or `abort`; returns when every connection has ended."""
        sockets = [listener.socket for listener in listeners if isinstance(listener, trio.SocketListener)]
        names = [socket.getsockname() for socket in sockets]
        self.port = names[0][1] if names else 0
        self.addresses = tuple(format_address(*name[:2]) for name in names)
        with self._serving:
            async with trio.open_nursery() as connections:
                self.realtime.sessions.run_in(connections)
                task_status.started(self)
                with self._accepting:
                    await trio.serve_listeners(self.connections.handle, list(listeners), handler_nursery=connections)
        await trio.lowlevel.checkpoint()

    async def drain(self, timeout: float | None = None) -> bool:
        """Stop accepting, finish the requests in flight within `timeout` seconds, then close every connection.

        Returns True if nothing had to be aborted.
        """
        self._accepting.cancel()
        finished = await self.engine.drain(timeout)
        self._close_connections(2 * CLOSE_TIMEOUT)
        return finished

    def abort(self) -> None:
        """Abort every request, admit no more, and close every connection within a second, which reports the abort."""
        self.engine.runtime.gate.change_power(PowerEvent.DRAIN)
        self.engine.abort_all(Cause.SHUTDOWN)
        self._accepting.cancel()
        self._close_connections(ABORT_TIMEOUT)

    def _close_connections(self, timeout: float) -> None:
        """Close each connection once its request is over, and all of them after `timeout` seconds."""
        self.connections.close_idle()
        self._closing.set()
        self._serving.deadline = min(self._serving.deadline, trio.current_time() + timeout)

    def _routes(self) -> Routes:
        engine, model = self.engine, self.model_name
        unknown_fields = self._unknown_fields
        reasoning_form = REASONING_FORMS.get(self.config.reasoning_parser)  # None: none
        chat = ChatCompletions(engine, model, self.in_flight, unknown_fields, self._tool_form, reasoning_form)
        completions = Completions(engine, model, self.in_flight, unknown_fields)
        routes = {
            **plain_routes(engine, self.metrics),
            "/v1/chat/completions": post(chat, CHAT_COMPLETIONS),
            "/v1/completions": post(completions, COMPLETIONS),
            **model_routes(engine, model, unknown_fields, self._tool_form),
            **admin_routes(engine, self.in_flight, self.config.weights_dir),
        }
        return {
            **pages(
                routes, engine, model, has_keys=self.config.has_keys, scheme=self.scheme, root=self.config.root_path
            ),
            **routes,
        }


async def serve(
    config: EngineConfig | None = None,
    serve_config: ServeConfig | None = None,
    *,
    ports: Ports | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an engine until the server is drained or aborted, or this is cancelled. It listens before the model loads.

    Connections beyond `max_connections`, or beyond the limit of file descriptors, are answered with 503. Raises
    InvalidConfig for an address that other machines reach without a key, unless `insecure`, for a `weights_dir`
    other than a directory, and for an unusable certificate; EngineError when it cannot listen, or the engine cannot
    run.
    """
    serve_config = ServeConfig() if serve_config is None else serve_config
    if serve_config.weights_dir is not None and not await trio.Path(serve_config.weights_dir).is_dir():
        raise InvalidConfig.of("weights_dir", f"must be a directory, got {brief(serve_config.weights_dir)}")
    host, port = serve_config.host, serve_config.port
    if not (serve_config.has_keys or serve_config.insecure or is_loopback(host)):
        with _listening_on(host, port):
            await trio.socket.getaddrinfo(host, port)  # an unknown name raises another error
        problem = f"{host} is reachable from other machines, and no key is set"
        raise InvalidConfig.of("host", f"{problem}: give an --api-key, or --insecure to serve all of them")
    tls = await trio.to_thread.run_sync(tls_context, serve_config)
    warn_of_short_keys(serve_config)
    engine = Engine(config, ports=ports, on_progress=on_progress, on_load=on_load)
    server = Server(engine, serve_config, tls)
    listeners = await _listen(host, port)
    async with open_unwrapped_nursery() as nursery:
        nursery.start_soon(partial(_run_engine, engine, nursery.cancel_scope))
        try:
            await server.run(listeners, task_status=task_status)
        finally:
            engine.close()


async def _run_engine(engine: Engine, scope: trio.CancelScope) -> None:
    await engine.run()
    scope.cancel()


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    with _listening_on(host, port):
        return await trio.open_tcp_listeners(port, host=host)


@contextmanager
def _listening_on(host: str, port: int) -> Iterator[None]:
    """Raise errors of listening as an EngineError with a hint."""
    try:
        yield
    except (OSError, ValueError) as exc:  # UnicodeError, for one, if it cannot be a name
        why = getattr(exc, "strerror", None) or exc
        if getattr(exc, "errno", None) == errno.EADDRINUSE:
            why = f"{why}; choose another --port"
        if isinstance(exc, socket.gaierror | UnicodeError):
            why = f"{why}; choose another --host"
        raise EngineError(f"cannot listen on {format_address(host, port)}: {why}") from exc
