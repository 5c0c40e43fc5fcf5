"""One connection to a server: who reads, who writes, who keeps it alive, and how all of it ends together."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import trio

from trioengine.aio.nursery import Notifier
from trioengine.aio.websocket import Closed, Rejected, WebSocket
from trioengine.client.address import Endpoint
from trioengine.client.problems import loss_of, refusal_of, unanswered
from trioengine.core.errors import ConnectionLost, EngineError

CONNECT_TIMEOUT = 30.0  # seconds, until the server has said who it is
CLOSE_TIMEOUT = 5.0
PING_INTERVAL = 20.0  # the answer may take as long

OnEvent: TypeAlias = Callable[[dict[str, Any]], None]


class Connection:
    """`run` is its life.

    `on_event` gets each event, but for the states of the server's engine, which `on_state` is told. `on_loss` is told,
    when it has begun and ends, why there are no more.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_event: OnEvent,
        on_state: Callable[[str], object],
        on_loss: Callable[[EngineError], None],
    ) -> None:
        self.posts = Posts()
        self._endpoint = endpoint
        self.model: str | None = None  # as the server calls it
        self.takes_images = False  # that model, as far as it is known
        self._on_event = on_event
        self._on_state = on_state
        self._on_loss = on_loss
        self._problem: dict[str, Any] | None = None  # the latest of no event of ours: a message that was not kept
        self._loss: EngineError = ConnectionLost("the connection was closed")
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()
        self._over: trio.Event | None = None

    async def run(self, *, task_status: trio.TaskStatus[str]) -> None:
        """Connect, and start with the server's id of the session. Raises why it cannot be done; later it only ends."""
        self._over = over = trio.Event()
        try:
            with trio.move_on_after(CONNECT_TIMEOUT) as connecting:
                async with await self._endpoint.dial() as stream:
                    websocket = WebSocket(stream)
                    session_id = await self._begin(websocket)
                    connecting.deadline = float("inf")
                    await self._talk(websocket, session_id, task_status)
            if connecting.cancelled_caught:
                raise ConnectionLost(f"{self._endpoint.authority} does not answer within {CONNECT_TIMEOUT:g} s")
        finally:
            over.set()

    def close(self) -> None:
        """Say goodbye; if that is not answered, close without."""
        self._closing.set()

    async def over(self) -> None:
        """Wait until it is closed; at once if there never was one."""
        if self._over is not None:
            await self._over.wait()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """A task that ends when the connection does."""
        assert self._nursery is not None, "it has begun"
        self._nursery.start_soon(function, *args)

    async def _begin(self, websocket: WebSocket) -> str:
        """The handshake, and the session that the server tells of."""
        endpoint = self._endpoint
        try:
            await websocket.shake_hands(endpoint.authority, endpoint.target, endpoint.headers)
            event = json.loads(await websocket.read())
            model = event["session"].get("model")
            self.model = model if isinstance(model, str) else None
            self._learn_modalities(event["session"])
            return str(event["session"]["id"])
        except Rejected as exc:
            raise refusal_of(exc, endpoint.authority) from exc
        except Closed as exc:
            raise unanswered(exc, endpoint.authority) from exc
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ConnectionLost(f"{endpoint.authority} does not begin with a session.created") from exc

    async def _talk(self, websocket: WebSocket, session_id: str, task_status: trio.TaskStatus[str]) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                scope = self._nursery.cancel_scope
                self._nursery.start_soon(websocket.write)
                self._nursery.start_soon(self.posts.send_to, websocket)
                self._nursery.start_soon(self._keep_alive, websocket, scope)
                self._nursery.start_soon(self._close_when_asked, websocket, scope)
                task_status.started(session_id)
                await self._read(websocket)
                with trio.move_on_after(CLOSE_TIMEOUT):
                    await websocket.flushed()
                scope.cancel()
        finally:
            self._on_loss(self._loss)

    async def _read(self, websocket: WebSocket) -> None:
        """Always, also while nobody reads the answer: only so is it noticed that the server has gone."""
        while (state := await self._next_state(websocket)) is not None:
            self._on_state(state)

    async def _next_state(self, websocket: WebSocket) -> str | None:
        """Hand events on until one tells a state; None when there are no more."""
        try:
            while (event := json.loads(await websocket.read()))["type"] != "engine.state":
                if event["type"] == "error" and event["error"].get("event_id") is None:
                    self._problem = event["error"]
                self._on_event(event)
            self._learn_modalities(event)
            return str(event["state"])
        except Closed as exc:
            self._loss = loss_of(exc, self._problem)
        except (ValueError, LookupError, TypeError) as exc:
            self._loss = ConnectionLost("the server sent what is no event of the protocol")
            self._loss.__cause__ = exc
        return None

    def _learn_modalities(self, shown: Mapping[str, Any]) -> None:
        """From the session, or a state of the engine: while that loads, the model may not be known."""
        if "input_modalities" in shown:
            self.takes_images = "image" in shown["input_modalities"]

    async def _keep_alive(self, websocket: WebSocket, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(PING_INTERVAL)
            with trio.move_on_after(PING_INTERVAL) as waiting:
                await websocket.ping()
            if waiting.cancelled_caught:
                self._loss = ConnectionLost("the server does not answer")
                scope.cancel()

    async def _close_when_asked(self, websocket: WebSocket, scope: trio.CancelScope) -> None:
        await self._closing.wait()
        websocket.say_goodbye()
        await trio.sleep(CLOSE_TIMEOUT)
        scope.cancel()


WINDOW = 32  # a server closes the connection at 64


class Posts:
    """`put` is synchronous, one task sends."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[str, str | None]] = deque()
        self._unanswered: set[str] = set()
        self._changes = Notifier()

    def put(self, text: str, awaited: str | None = None) -> None:
        """Send this; `awaited` is the event's id if `answered` will be called with it."""
        self._unsent.append((text, awaited))
        self._changes.notify()

    def answered(self, event_id: object) -> None:
        """The server is done with this event; any other id is ignored."""
        if event_id in self._unanswered:
            self._unanswered.remove(str(event_id))
            self._changes.notify()

    async def send_to(self, websocket: WebSocket) -> None:
        """Send until cancelled."""
        while True:
            while not self._unsent or len(self._unanswered) >= WINDOW:
                await self._changes.wait()
            text, awaited = self._unsent.popleft()
            if awaited is not None:
                self._unanswered.add(awaited)
            websocket.send(text)
