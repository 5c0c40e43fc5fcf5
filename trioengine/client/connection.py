"""One connection to a server, the events on their way to it, and all connections of a client.

Each connection runs in a task of the client's nursery. Its tasks read, write, send a ping every PING_INTERVAL, and
close when asked; they all end with the first that finds the connection over.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import trio

from trioengine.actors.waiting_line import waits_for
from trioengine.aio.concurrency import Deadline, Notifier
from trioengine.aio.websocket import Closed, Rejected, WebSocket
from trioengine.client.address import Endpoint
from trioengine.client.problems import is_unread, loss_of, refusal_of, unanswered
from trioengine.core.errors import ConnectionLost, EngineAsleep, EngineClosed, EngineError, EngineOverloaded

CONNECT_TIMEOUT = 30.0  # seconds, until the server has sent session.created
CLOSE_TIMEOUT = 5.0
PING_INTERVAL = 20.0  # and the longest wait for the pong
WINDOW = 32  # unanswered events; a server closes the connection at 64

OnEvent: TypeAlias = Callable[[dict[str, Any]], None]


class Connections:
    """All connections of one client."""

    def __init__(self, endpoint: Endpoint, nursery: trio.Nursery, on_state: Callable[[str], object]) -> None:
        self.endpoint = endpoint
        self._nursery = nursery
        self._on_state = on_state
        self._open: set[Connection] = set()
        self._opening: set[trio.CancelScope] = set()  # of calls of `start`
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    async def start(self, connection: Connection, *, wait: bool | None, deadline: Deadline) -> str:
        """Connect, and return the server's id of the session. A full server is asked again, as `wait` allows.

        Raises TimedOut after the deadline, the server's refusal, ConnectionLost, and EngineClosed after `close`.
        """
        refusal: EngineError | None = None
        with trio.move_on_at(deadline.at) as opening:
            self._opening.add(opening)
            try:
                while not self._closed:
                    try:
                        session_id: str = await self._nursery.start(self._run, connection)
                        return session_id
                    except (EngineOverloaded, EngineAsleep) as exc:
                        if not waits_for(exc, wait):
                            raise
                        refusal, retry_after = exc, exc.retry_after
                    await trio.sleep(retry_after)
            finally:
                self._opening.discard(opening)
        if self._closed:
            raise EngineClosed("the client is closed")
        obstacle = refusal or f"{self.endpoint.authority} does not answer"
        raise deadline.passed(f"while waiting: {obstacle}") from refusal

    async def _run(self, connection: Connection, *, task_status: trio.TaskStatus[str]) -> None:
        self._open.add(connection)
        try:
            await connection.run(task_status=task_status)
        finally:
            self._open.discard(connection)

    def report_state(self, state: str) -> None:
        """Call the client's `on_state`. If that raises, the client ends with the exception, not the connection."""
        scope = self._nursery.cancel_scope
        try:
            if not scope.cancel_called:
                self._on_state(state)
        except Exception as exc:
            scope.cancel()  # in this step, so that readers are cancelled before they see a lost connection
            self._nursery.start_soon(_raise, exc)

    def close(self) -> None:
        """Close every connection; `start` raises EngineClosed, now and from now on."""
        self._closed = True
        for opening in self._opening:
            opening.cancel()
        for connection in self._open:
            connection.close()


async def _raise(error: Exception) -> None:
    raise error


class Connection:
    """One session's connection.

    `on_event` gets each event except the engine's states, which `on_state` gets. `on_loss` is called once with the
    reason when a connection that had begun ends.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_event: OnEvent,
        on_state: Callable[[str], object],
        on_loss: Callable[[EngineError], None],
    ) -> None:
        self.posts = Posts()
        self.model: str | None = None  # the server's name of it
        self.takes_images = False  # whether the model does; False while that is unknown
        self._endpoint = endpoint
        self._on_event = on_event
        self._on_state = on_state
        self._on_loss = on_loss
        self._problem: dict[str, Any] | None = None  # the latest error event about no event: a message was not kept
        self._loss: EngineError = ConnectionLost("the connection was closed")
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()
        self._over: trio.Event | None = None

    async def run(self, *, task_status: trio.TaskStatus[str]) -> None:
        """Connect, report the server's id of the session, and return when the connection is over.

        Raises ConnectionLost or the server's refusal if the connection cannot begin.
        """
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
        """Close the WebSocket; if the server does not answer within CLOSE_TIMEOUT, without its answer."""
        self._closing.set()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed; return at once if it never was open."""
        if self._over is not None:
            await self._over.wait()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a task that ends with the connection."""
        assert self._nursery is not None, "it has begun"
        self._nursery.start_soon(function, *args)

    async def _begin(self, websocket: WebSocket) -> str:
        """Shake hands, and return the id in session.created."""
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
        async with trio.open_nursery() as self._nursery:
            scope = self._nursery.cancel_scope
            self._nursery.start_soon(websocket.write)
            self._nursery.start_soon(self.posts.send_to, websocket)
            self._nursery.start_soon(self._keep_alive, websocket, scope)
            self._nursery.start_soon(self._close_when_asked, websocket, scope)
            task_status.started(session_id)
            try:
                await self._read(websocket)
                with trio.move_on_after(CLOSE_TIMEOUT):
                    await websocket.flushed()
            finally:
                self._on_loss(self._loss)  # while the nursery is open: until then, calls start tasks in it
            scope.cancel()

    async def _read(self, websocket: WebSocket) -> None:
        """Process events until there are no more. It reads whether or not an answer is read, to notice a loss."""
        while (state := await self._next_state(websocket)) is not None:
            self._on_state(state)

    async def _next_state(self, websocket: WebSocket) -> str | None:
        """Process events up to the next engine.state, and return the state; None when there are no more."""
        try:
            while (event := json.loads(await websocket.read()))["type"] != "engine.state":
                if event["type"] == "error" and event["error"].get("event_id") is None:
                    self._problem = event["error"]
                    if is_unread(self._problem):
                        self._loss = ConnectionLost(f"the server cannot read a message: {self._problem.get('message')}")
                        websocket.close()
                        return None
                self._on_event(event)
            self._learn_modalities(event)
            return str(event["state"])
        except Closed as exc:
            self._loss = loss_of(exc, self._problem)
        except (ValueError, LookupError, TypeError) as exc:
            self._loss = ConnectionLost("the server sent an invalid event")
            self._loss.__cause__ = exc
        return None

    def _learn_modalities(self, shown: Mapping[str, Any]) -> None:
        """From a session or an engine.state; both may lack them while the model loads."""
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
        websocket.close()
        await trio.sleep(CLOSE_TIMEOUT)
        scope.cancel()


class Posts:
    """Events on their way to the server: sent in order, at most WINDOW of them unanswered."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._unsent: deque[tuple[str, str | None]] = deque()
        self._unanswered: set[str] = set()
        self._sendable = Notifier()

    def mint(self, kind: str) -> str:
        """A new id of an event."""
        return f"{kind}_{next(self._ids)}"

    def put(self, text: str, awaited: str | None = None) -> None:
        """Send this event; `awaited` is its id if `on_answer` will be called with it."""
        self._unsent.append((text, awaited))
        self._sendable.notify()

    def on_answer(self, event_id: object) -> None:
        """The server has answered the event with this id; other ids are ignored."""
        if event_id in self._unanswered:
            self._unanswered.remove(str(event_id))
            self._sendable.notify()

    async def send_to(self, websocket: WebSocket) -> None:
        """Send until cancelled."""
        while True:
            while not self._unsent or len(self._unanswered) >= WINDOW:
                await self._sendable.wait()
            text, awaited = self._unsent.popleft()
            if awaited is not None:
                self._unanswered.add(awaited)
            websocket.send(text)
