"""The engine, or a server's client, for code without trio, such as the cells of a notebook.

    engine = open_engine("smollm2-135m-instruct")
    session = engine.open_session()
    for chunk in session.generate("Hello!", max_tokens=32):
        print(chunk.text, end="")

Every call blocks its thread while trio runs in another one, so it works beside a running asyncio loop as well. An
exception in the calling thread, such as the KeyboardInterrupt of Ctrl-C, cancels the task of the call, and the call
returns when that task has ended: an answer is aborted, and its turn taken back unless it is kept. Engine, client and
session can be used as context managers. If they are not closed, they are closed when they are not referenced any more,
or when Python exits.

A method that is made of an asynchronous one has its arguments, its errors and its docstring.
"""

from __future__ import annotations

import abc
import ssl
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack

import trioengine.actors.engine
import trioengine.actors.opening
import trioengine.actors.session
import trioengine.client.client
from trioengine.actors.statistics import Statistics
from trioengine.blocking.loop import SHORTENED, Handle, Loop, awaited, opened, posted, shortened, shortens
from trioengine.core.checks import names_checked
from trioengine.core.config import EngineConfig, EngineOptions, merged_config
from trioengine.core.lifecycle import Power
from trioengine.core.types import Chunk, Completion

_Engine = trioengine.actors.engine.Engine
_Session = trioengine.actors.session.Session


class Generation(Handle, refuses=("with", "next")):
    """One request, asked when it is iterated over: `for chunk in session.generate(...)`.

    Leaving the loop early, by `break` or an exception, aborts the request.
    """

    _noun = "a generation"
    _usage = "use `for chunk in session.generate(...)`, or `session.ask(...)` for the whole answer"

    def __init__(self, session: Session, inner: Any) -> None:
        self._is_asked = False
        self._session = session  # kept alive by this reference
        self.loop = session.loop
        self.inner = inner

    def __repr__(self) -> str:
        return super().__repr__() if self._is_asked else f"<Generation not asked: {self._usage}>"

    def __iter__(self) -> Iterator[Chunk]:
        """Ask, and yield the answer in chunks, once. Raises as the asynchronous Generation does."""
        try:
            yield from self._chunks()
        except SHORTENED as error:
            raise shortened(error) from error.__cause__

    def _chunks(self) -> Iterator[Chunk]:
        if self._is_asked:
            raise RuntimeError("a generation is read once: its `completion` is the answer; generate again to ask again")
        self._is_asked = True
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        with self.loop.running(self._read, chunks.put) as task:
            task.future.add_done_callback(lambda _: chunks.put(None))
            while (chunk := chunks.get()) is not None:
                yield chunk
            self.loop.result(task)

    async def _read(self, put: Callable[[Chunk], None]) -> None:
        async with self.inner as generation:
            async for chunk in generation:
                put(chunk)

    @shortens
    def result(self) -> Completion:
        """Ask, read to the end and return the whole answer."""
        for _ in self._chunks():
            pass
        return self._completion()

    @property
    @shortens
    def completion(self) -> Completion:
        """The answer, once there is an outcome. Raises the typed error of a failed request."""
        return self._completion()

    def _completion(self) -> Completion:
        completion: Completion = self.loop.call_sync(lambda: self.inner.completion)
        return completion

    @shortens
    def abort(self) -> bool:
        """Abort the request, from any thread. Returns whether this call aborts it."""
        aborts: bool = self.loop.call_sync(self.inner.abort)
        return aborts


class _Closable(Handle, abc.ABC):
    """Base class of the handles that can be closed; leaving a `with` closes them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None: ...


class Session(_Closable):
    """A conversation: `engine.open_session()`."""

    _noun = "a session"
    _usage = "use `with engine.open_session() as session`"

    def __init__(self, host: _Host, inner: Any) -> None:
        self.loop = host.loop
        self.inner = inner
        self._host = host  # kept alive by this reference
        weakref.finalize(self, self.loop.end_soon, inner.end).atexit = False
        self.loop.call(inner.__aenter__)

    @property
    @shortens
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages."""
        return self.loop.call_sync(lambda: self.inner.history)

    generate = opened(_Session.generate, Generation)
    ask = awaited(_Session.ask)
    replace_history = posted(_Session.replace_history)

    def close(self) -> None:
        """End the session; a request in flight is aborted. Harmless when the session or the engine has ended."""
        self.loop.end_soon(self.inner.end)


class _Host(_Closable):
    """Base class of Engine and Client, which open sessions."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.loop = Loop(opening)
        self.inner = self.loop.resource
        weakref.finalize(self, self.loop.close)  # and when Python exits

    open_session = opened(_Engine.open_session, Session)
    generate = awaited(_Engine.generate)
    ask = awaited(_Engine.ask)
    abort = posted(_Engine.abort)

    def close(self) -> None:
        """End every session, close the engine or client, and wait until it is closed. Harmless when closed."""
        self.loop.close()


class Client(_Host):
    """A client of a server: `connect(url)`."""

    _noun = "a client"
    _usage = "use `with connect(...) as client`"


class Engine(_Host):
    """An engine of this process: `open_engine(model)`."""

    _noun = "an engine"
    _usage = "use `with open_engine(...) as engine`"

    @property
    def state(self) -> Power:
        """The engine's state."""
        state: Power = self.inner.state
        return state

    @shortens
    def statistics(self) -> Statistics:
        """The counts at this moment."""
        statistics: Statistics = self.loop.call_sync(self.inner.statistics)
        return statistics

    embed = awaited(_Engine.embed)
    abort_all = posted(_Engine.abort_all)
    sleep = awaited(_Engine.sleep)
    wake = awaited(_Engine.wake)
    update_weights = awaited(_Engine.update_weights)
    load_adapter = awaited(_Engine.load_adapter)
    unload_adapter = posted(_Engine.unload_adapter)


@shortens
def open_engine(
    config: EngineConfig | str | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine that is ready. Arguments and errors are as in the asynchronous `open_engine`.

    Interrupted, it closes the engine again. The callbacks are called in other threads.
    """
    whole = merged_config(config, options)
    opening = trioengine.actors.opening.open_engine
    return Engine(partial(opening, whole, on_progress=on_progress, on_load=on_load))


@shortens
@names_checked
def connect(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Client:
    """A client of the server at `url`. Arguments and errors are as in the asynchronous `connect`."""
    opening = trioengine.client.client.connect
    return Client(partial(opening, url, api_key=api_key, model=model, ssl_context=ssl_context))
