"""The WebSocket endpoint of a server: it begins sessions, and connects clients to those that they resume."""

from __future__ import annotations

from contextlib import ExitStack

import trio

from trioengine.actors.engine import Engine
from trioengine.serve.asked_model import AskedModel, ServedNames
from trioengine.serve.auth import Caller
from trioengine.serve.body import DisconnectCounter
from trioengine.serve.config import ServeConfig
from trioengine.serve.errors import SERVER_ERROR, ClientError, OverBudget, Problem
from trioengine.serve.http import HttpRequest
from trioengine.serve.limits import ByteBudget, Held, InFlight
from trioengine.serve.log_fields import SESSION
from trioengine.serve.realtime.carrier import CLOSE_TIMEOUT, Carrier
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.handshake import Handshake
from trioengine.serve.realtime.response import ResponseRunner
from trioengine.serve.realtime.resumable import ResumableSessions
from trioengine.serve.realtime.window import Window
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.serve.websocket import AcceptedWebSocket
from trioengine.text.tool_calls import ToolForm

NOT_RESUMED = 4002


class RealtimeEndpoint:
    """Serves the WebSockets of one server. Sessions that can be resumed run in the nursery given to `sessions`."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        config: ServeConfig,
        closing: trio.Event,
        *,
        in_flight: InFlight,
        budget: ByteBudget,
        disconnects: DisconnectCounter,
        unknown_fields: UnknownFields,
        tool_form: ToolForm | None,
    ) -> None:
        self.sessions = ResumableSessions(engine.observers)
        self._engine = engine
        self._model = model
        self._config = config
        self._closing = closing
        self._in_flight = in_flight
        self._budget = budget
        self._disconnects = disconnects
        self._unknown_fields = unknown_fields
        self._tool_form = tool_form

    def check(self, request: HttpRequest, caller: Caller) -> None:
        """Raise ClientError to refuse a handshake, or EngineOverloaded for an adapter while the model loads."""
        handshake = Handshake.of(request)
        if handshake.token is not None:
            session = self.sessions.find(handshake.token, caller.key)
            session.check_models(handshake.models)
            session.check_last(handshake.last)
            return
        self._asked(handshake)
        if handshake.seconds is not None and len(self.sessions) >= self._config.max_connections:
            message = f"limit of sessions that can be resumed reached ({self._config.max_connections})"
            raise OverBudget(503, Problem(SERVER_ERROR, "too_many_sessions", message, retry_after=1.0))

    async def serve(self, websocket: AcceptedWebSocket, request: HttpRequest, caller: Caller, held: Held) -> None:
        """Serve a client, whose handshake was checked, until its session is over or another connection has it."""
        handshake = Handshake.of(request)
        if handshake.token is not None:
            await self._resume(websocket, handshake.token, handshake.last, caller)
            return
        try:
            asked = self._asked(handshake)
        except ClientError as exc:  # its adapter was unloaded since the check
            await _refuse(websocket, exc)
            return
        if handshake.seconds is not None:
            await self._serve_resumable(websocket, Window(handshake.seconds), caller, asked)
        else:
            await self._serve_once(websocket, caller, held, asked)

    def _asked(self, handshake: Handshake) -> AskedModel:
        """Return the last of the models that a client names. Raises ClientError for one that is not served."""
        asked = AskedModel(self._model)
        for name in handshake.models:
            asked = ServedNames.of(self._engine, self._model).asked(name)
        return asked

    async def _serve_once(self, websocket: AcceptedWebSocket, caller: Caller, held: Held, asked: AskedModel) -> None:
        """Serve a session that ends with its connection."""
        session = self._session(caller, held, asked)
        SESSION.set(session.id)
        carrier = session.attach(websocket)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carrier.run)
            await session.run()

    async def _serve_resumable(
        self, websocket: AcceptedWebSocket, window: Window, caller: Caller, asked: AskedModel
    ) -> None:
        with ExitStack() as stack:
            held = stack.enter_context(self._budget.holding(caller.key))
            if caller.sessions is not None:
                stack.enter_context(caller.sessions.moved())
            session = self._session(caller, held, asked, window)
            SESSION.set(session.id)
            carrier = session.attach(websocket)
            self.sessions.start(session, window, caller.key, stack.pop_all())
        await _carry(session, carrier)

    async def _resume(self, websocket: AcceptedWebSocket, token: str, last: int, caller: Caller) -> None:
        """Connect the client to its session, unless that has ended, or dropped events, since the check."""
        try:
            session = self.sessions.find(token, caller.key)
            carrier = session.attach(websocket, last)
        except ClientError as exc:
            await _refuse(websocket, exc)
            return
        SESSION.set(session.id)
        await _carry(session, carrier)

    def _session(
        self, caller: Caller, held: Held, asked: AskedModel, window: Window | None = None
    ) -> RealtimeConnection:
        return RealtimeConnection(
            ResponseRunner(self._engine, self._in_flight, caller.cache_salt, asked.adapter),
            asked.name,
            self._closing,
            disconnects=self._disconnects,
            held=held,
            limits=self._config,
            unknown_fields=self._unknown_fields,
            tool_form=self._tool_form,
            window=window,
        )


async def _refuse(websocket: AcceptedWebSocket, error: ClientError) -> None:
    """Close a WebSocket for a change since its handshake was checked."""
    with trio.move_on_after(CLOSE_TIMEOUT):
        await websocket.aclose(NOT_RESUMED, error.problem.code)


async def _carry(session: RealtimeConnection, carrier: Carrier) -> None:
    """Carry a session until it is over, or has another carrier, or its client is lost."""
    try:
        await carrier.run()
    finally:
        session.lose(carrier)
