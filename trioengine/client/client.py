"""A server, as a program has it that reaches it over the network."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Unpack

import trio

from trioengine.actors.waiting_line import waits_for
from trioengine.aio.calls import opens, whole_answer
from trioengine.aio.deadline import Deadline, deadline_after
from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.client.address import Address, Endpoint
from trioengine.client.connection import Connection
from trioengine.client.generation import Generation
from trioengine.client.media import Media
from trioengine.client.session import Session
from trioengine.core.arguments import check_callback, check_request, names_checked
from trioengine.core.bounds import brief, counted, is_key
from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvalidConfig,
    SessionEnded,
    TimedOut,
)
from trioengine.core.sampling_params import Overflow, SamplingOptions, SamplingParams, merged_params, sampling_checked
from trioengine.core.types import Cause, Completion


class Client:
    """What `connect` gives: sessions as an engine's, each over a WebSocket of its own."""

    def __init__(self, endpoint: Endpoint, nursery: trio.Nursery, on_state: Callable[[str], object]) -> None:
        self.endpoint = endpoint
        self.request_ids = itertools.count(1)
        self._on_state = on_state
        self._nursery = nursery
        self._connections: set[Connection] = set()
        self._sessions: dict[Session, None] = {}  # in the order in which they were entered
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self.endpoint.authority}, {counted(len(self._connections), 'session')}>"

    @names_checked
    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        overflow: Overflow = "refuse",
    ) -> Session:
        """A session, to be entered. `label` is the caller's name for it, `history` chat messages to begin with.

        `overflow` is for a chat that outgrows the context, as in Engine.open_session. An unknown one raises
        RequestRejected here.

        Entering raises ConnectionLost when the server cannot be reached, RequestRejected when it refuses the key, the
        model or the history. A server that has no place is asked again, with `wait=True` also one that cannot serve at
        the moment, until TimedOut, `timeout` seconds from this call; with `wait=False` EngineOverloaded is raised.
        """
        deadline = deadline_after(timeout)
        return Session(self, label=label, history=history, wait=wait, overflow=overflow, deadline=deadline)

    @whole_answer
    @sampling_checked
    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One answer, in a session of its own. Errors, keywords, timeout, wait and label as in Session.generate."""
        deadline, params = deadline_after(timeout), merged_params(params, options)
        session = Session(self, label=label, history=None, wait=wait, deadline=deadline)
        generation = session.opens_with = Generation(
            session, prompt, params, media=media, keep_partial=False, deadline=deadline, wait=wait, label=label
        )
        try:
            async with session, generation:
                return await generation.result()
        except TimedOut as exc:
            if exc.completion is None:  # it waited for the session
                session.abort_request(generation, Cause.TIMEOUT)
                exc.completion = generation.completion
            raise
        except SessionEnded:
            if generation.outcome is None:
                raise
            return generation.completion  # it was aborted while its session was opened

    ask = whole_answer(sampling_checked(generate, "ask"))

    @names_checked
    def abort(self, request: int | str) -> int:
        """Abort the request of this id, or every request of this label, of this client: in flight or on its way in.

        Returns how many this call aborts, as Engine.abort does.
        """
        name = check_request(request)
        found = [(session, each) for session in self._sessions for each in session.requests if each.is_called(name)]
        return sum(session.abort_request(generation, Cause.CLIENT) for session, generation in found)

    def adopt(self, session: Session) -> None:
        """A session is entered: `abort` finds its requests from now on."""
        self._sessions[session] = None

    def release(self, session: Session) -> None:
        """A session is over; harmless when it is released."""
        self._sessions.pop(session, None)

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

    async def start(self, connection: Connection, *, wait: bool | None, deadline: Deadline) -> str:
        """What a session calls: the connection lives in the client's nursery. Returns the server's id of the session.

        A server that has no place is asked again, as `wait` allows. Raises TimedOut after the deadline.
        """
        refusal: EngineError | None = None
        with trio.move_on_at(deadline.at):
            while True:
                if self._closed:
                    raise EngineClosed("the client is closed")
                try:
                    session_id: str = await self._nursery.start(self._run, connection)
                    return session_id
                except (EngineOverloaded, EngineAsleep) as exc:
                    if not waits_for(exc, wait):
                        raise
                    refusal, retry_after = exc, exc.retry_after
                await trio.sleep(retry_after)
        lack = refusal or f"{self.endpoint.authority} does not answer"
        raise deadline.passed(f"while waiting: {lack}") from refusal

    async def _run(self, connection: Connection, *, task_status: trio.TaskStatus[str]) -> None:
        self._connections.add(connection)
        try:
            await connection.run(task_status=task_status)
        finally:
            self._connections.discard(connection)


async def _raise(error: Exception) -> None:
    raise error


@names_checked
@opens("client")
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
    if api_key is not None and not is_key(api_key):
        raise InvalidConfig.of("api_key", "must be one key of visible ASCII characters")
    if not (model is None or isinstance(model, str)):
        raise InvalidConfig.of("model", f"must be a name, got {brief(model)}")
    check_callback("dial", dial)
    check_callback("on_state", on_state)
    address = Address.parse(url, model)
    headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
    endpoint = Endpoint(address.authority, address.target, headers, address.dial if dial is None else dial)
    async with open_unwrapped_nursery() as nursery:
        client = Client(endpoint, nursery, on_state)
        try:
            yield client
        finally:
            client.close()
