"""The session of `generate` or `chat`: of an engine in this process, or of a server. Both have the same surface."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.opening import open_engine
from trioengine.actors.session import Session
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.cli.errors import warn
from trioengine.cli.progress import progress_bars
from trioengine.client.address import Address
from trioengine.client.client import connect
from trioengine.client.generation import Generation as RemoteGeneration
from trioengine.client.session import Session as RemoteSession
from trioengine.core.config import EngineConfig
from trioengine.core.errors import ConnectionLost, EngineClosed, InvalidConfig
from trioengine.core.lifecycle import Power

AnySession: TypeAlias = Session | RemoteSession
AnyGeneration: TypeAlias = Generation | RemoteGeneration
History: TypeAlias = Sequence[Mapping[str, Any]]  # chat messages
Notify: TypeAlias = Callable[[str], object]  # a notice beside the answers
OpenSession: TypeAlias = Callable[[History, Notify], AbstractAsyncContextManager[AnySession]]


def notify_on_stderr(text: str) -> None:
    """Write a line to stderr, on a terminal perhaps in the middle of an answer."""
    warn(text, before="\n" if sys.stderr.isatty() else "")


@asynccontextmanager
async def local_session(
    config: EngineConfig, history: History = (), notify: Notify = notify_on_stderr
) -> AsyncIterator[AnySession]:
    """Open a session of an engine in this process. Its start is shown on a terminal; `notify` reports a lost worker."""
    with progress_bars() as bars:
        async with (
            open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine,
            open_unwrapped_nursery() as nursery,
            engine.open_session(history=history) as session,
        ):
            nursery.start_soon(_report_worker_losses, engine, notify)
            yield session
            nursery.cancel_scope.cancel()


async def _report_worker_losses(engine: Engine, notify: Notify) -> None:
    is_lost = False
    with engine.states() as states:
        async for state in states:
            if state.power is (Power.AWAKE if is_lost else Power.RESTARTING):
                is_lost = not is_lost
                notify("the worker was lost; the engine is restarting" if is_lost else "the engine is awake")


@asynccontextmanager
async def remote_session(
    url: str, api_key: str | None, model: str | None, history: History = (), notify: Notify = notify_on_stderr
) -> AsyncIterator[AnySession]:
    """Open a session of a running server; `notify` reports changes of its engine's state, such as loading or asleep.

    Raises InvalidConfig, which names the option `connect`, for a bad URL.
    """
    try:
        Address.parse(url, model)
    except InvalidConfig as exc:
        raise InvalidConfig(str(exc).replace("url", "connect", 1), fields=("connect",)) from exc

    def notify_state(state: str) -> None:
        waits = "; a message waits until it is awake: trioengine wake" if state == "sleeping" else ""
        notify(f"the engine is {state}{waits}")

    async with (
        connect(url, api_key=api_key, model=model, on_state=notify_state) as client,
        client.open_session(wait=True, history=history) as session,
    ):
        yield session


@asynccontextmanager
async def open_chat(open_session: OpenSession, notify: Notify) -> AsyncIterator[ChatSession]:
    """Open a chat and its first session; its last session is closed after the block."""
    async with open_unwrapped_nursery() as nursery:
        chat = ChatSession(open_session, notify, nursery)
        await chat.open()
        yield chat
        await chat.close()


class ChatSession:
    """The session of a chat. After a lost connection, the next session continues the conversation.

    A task of its own holds the session, so that opening it can be cancelled.
    """

    def __init__(self, open_session: OpenSession, notify: Notify, nursery: trio.Nursery) -> None:
        self._open_session = open_session
        self._notify = notify
        self._nursery = nursery  # of the task
        self._history: History = ()  # of the next session
        self._session: AnySession | None = None
        self._is_left = trio.Event()
        self._has_ended = trio.Event()

    async def open(self) -> AnySession:
        """Return the session, opened if necessary; if cancelled, none is opened.

        Raises ConnectionLost if a new session is needed and cannot be opened.
        """
        if self._session is None:
            self._session = await self._nursery.start(self._hold)
        return self._session

    async def _hold(self, task_status: trio.TaskStatus[AnySession]) -> None:
        self._is_left, self._has_ended = trio.Event(), trio.Event()
        try:
            async with self._open_session(self._history, self._notify) as session:
                task_status.started(session)
                await self._is_left.wait()
        finally:
            self._has_ended.set()

    async def close(self) -> None:
        """Close the session; its conversation is kept for the next one."""
        if self._session is not None:
            self._history, self._session = self._session.history, None
            self._is_left.set()
            await self._has_ended.wait()

    async def clear(self) -> None:
        """Begin a new conversation. Raises ConnectionLost or EngineClosed if the connection is lost."""
        self._history = ()
        if self._session is not None:
            try:
                self._session.replace_history([])
            except (ConnectionLost, EngineClosed):
                await self.close()
                self._history = ()
                raise

    @property
    def is_remote(self) -> bool:
        """Whether a server has the session; an engine in this process that is closed cannot be opened again."""
        return not isinstance(self._session, Session)

    @property
    def model(self) -> str | None:
        """The server's name for its model."""
        return self._session.model if isinstance(self._session, RemoteSession) else None
