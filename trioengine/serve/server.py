"""The server: the connections of its engine's clients, from the first to the last."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import Cause
from trioengine.serve.admin import admin_routes
from trioengine.serve.auth import Access
from trioengine.serve.body import DisconnectCounter
from trioengine.serve.chat import OPERATION as CHAT_COMPLETIONS
from trioengine.serve.chat import ChatCompletions
from trioengine.serve.completions import OPERATION as COMPLETIONS
from trioengine.serve.completions import Completions
from trioengine.serve.config import ServeConfig
from trioengine.serve.connection import ConnectionHandler
from trioengine.serve.embeddings import OPERATION as EMBEDDINGS
from trioengine.serve.embeddings import Embeddings
from trioengine.serve.limits import ByteBudget, InFlight, clamp_to_fd_limit
from trioengine.serve.listening import format_address
from trioengine.serve.metrics import Metrics
from trioengine.serve.models import model_routes
from trioengine.serve.pages import pages
from trioengine.serve.realtime.connection import CLOSE_TIMEOUT
from trioengine.serve.realtime.endpoint import RealtimeEndpoint
from trioengine.serve.routes import Routes, plain_routes, post
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
        embeddings = Embeddings(engine, model, self.in_flight, unknown_fields)
        routes = {
            **plain_routes(engine, self.metrics),
            "/v1/chat/completions": post(chat, CHAT_COMPLETIONS),
            "/v1/completions": post(completions, COMPLETIONS),
            "/v1/embeddings": post(embeddings, EMBEDDINGS),
            **model_routes(engine, model, unknown_fields, self._tool_form),
            **admin_routes(engine, model, self.in_flight, self.config.weights_dir),
        }
        return {
            **pages(
                routes, engine, model, has_keys=self.config.has_keys, scheme=self.scheme, root=self.config.root_path
            ),
            **routes,
        }
