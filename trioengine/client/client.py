"""A server, as a program has it that reaches it over the network."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from trioengine.actors.deadline import deadline_after
from trioengine.actors.nursery import open_unwrapped_nursery
from trioengine.client.address import Address, Endpoint
from trioengine.client.connection import Connection
from trioengine.client.generation import Generation
from trioengine.client.session import Session
from trioengine.core.bounds import is_key
from trioengine.core.completion import Completion
from trioengine.core.errors import (
    ConnectionLost,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvalidConfig,
)
from trioengine.core.overflow import Overflow
from trioengine.core.sampling_params import SamplingParams


class Client:
    """What `connect` gives: sessions as an engine's, each over a WebSocket of its own."""

    def __init__(self, endpoint: Endpoint, nursery: trio.Nursery, on_state: Callable[[str], object]) -> None:
        self.endpoint = endpoint
        self.request_ids = itertools.count(1)
        self._on_state = on_state
        self._nursery = nursery
        self._connections: set[Connection] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self.endpoint.authority}, {len(self._connections)} sessions>"

    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[dict[str, Any]] | None = None,
        wait: bool = False,
        overflow: Overflow = "refuse",
    ) -> Session:
        """A session, to be entered. `label` is the caller's name for it, `history` chat messages to begin with.

        `overflow` is for a chat that outgrows the context, as in Engine.open_session. An unknown one raises
        RequestRejected here.

        Entering raises ConnectionLost when the server cannot be reached, RequestRejected when it refuses the key, the
        model or the history, EngineOverloaded when it has no place (with `wait` it is asked again).
        """
        return Session(self, label=label, history=history, wait=wait, overflow=overflow)

    async def generate(
        self,
        prompt: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        wait: bool = False,
    ) -> Completion:
        """One answer, in a session of its own. Errors, timeout and wait as in Session.generate.

        When the timeout passes before there is a connection, it raises the last refusal, or ConnectionLost.
        """
        deadline = deadline_after(timeout)
        session = Session(self, label=None, history=None, wait=wait, deadline=deadline)
        generation = Generation(session, prompt, params, keep_partial=False, deadline=deadline, wait=wait)
        async with session, generation:
            return await generation.result()

    def close(self) -> None:
        """End every session; no more are opened."""
        self._closed = True
        for connection in self._connections:
            connection.close()

    def tell_state(self, state: str) -> None:
        """What a session's connection calls. If the callback raises, this ends the client, not the connection."""
        scope = self._nursery.cancel_scope
        try:
            if not scope.cancel_called:
                self._on_state(state)
        except Exception as exc:
            scope.cancel()  # in this step: who reads is not told of a lost connection
            self._nursery.start_soon(_raise, exc)

    async def start(self, connection: Connection, *, wait: bool, deadline: float) -> str:
        """What a session calls: the connection lives in the client's nursery. Returns the server's id of the session.

        With `wait` a server that has no place is asked again. After the deadline it raises the last refusal, or
        ConnectionLost if there was none.
        """
        refusal: EngineError = ConnectionLost(f"{self.endpoint.authority} does not answer in time")
        with trio.move_on_at(deadline):
            while True:
                if self._closed:
                    raise EngineClosed("the client is closed")
                try:
                    session_id: str = await self._nursery.start(self._run, connection)
                    return session_id
                except (EngineOverloaded, EngineAsleep) as exc:
                    if not wait:
                        raise
                    refusal, retry_after = exc, exc.retry_after
                await trio.sleep(retry_after)
        raise refusal

    async def _run(self, connection: Connection, *, task_status: trio.TaskStatus[str]) -> None:
        self._connections.add(connection)
        try:
            await connection.run(task_status=task_status)
        finally:
            self._connections.discard(connection)


async def _raise(error: Exception) -> None:
    raise error


@asynccontextmanager
async def connect(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    dial: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
    on_state: Callable[[str], object] = lambda state: None,
) -> AsyncIterator[Client]:
    """A client of the server at `url`, such as ws://localhost:8000 or https://example.org.

    Nothing is connected before a session is opened. Leaving ends every session and closes its WebSocket; cancelled, or
    with an exception, at once. `model` is the name that the server must serve; `dial` gives the streams to connect by,
    in place of TCP and TLS. `on_state(state)` is told by each session when the state of the server's engine changes
    (`awake`, `sleeping`, `updating`, `restarting`, …); it must not block, and what it raises ends the client and comes
    out here. Raises InvalidConfig.
    """
    address = Address.parse(url, model)
    if api_key is not None and not is_key(api_key):
        raise InvalidConfig.of("api_key", "must be one key of visible ASCII characters")
    headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
    endpoint = Endpoint(address.authority, address.target, headers, address.dial if dial is None else dial)
    async with open_unwrapped_nursery() as nursery:
        client = Client(endpoint, nursery, on_state)
        try:
            yield client
        finally:
            client.close()
