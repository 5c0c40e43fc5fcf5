"""The engine, or a server's client, for code without trio, such as the cells of a notebook.

    engine = open_engine("smollm2-135m-instruct")
    session = engine.open_session()
    for chunk in session.generate("Hello!", max_tokens=32):
        print(chunk.text, end="")

Every call blocks its thread while trio runs in another one, so it works beside a running asyncio loop as well. An
exception in the calling thread, such as the KeyboardInterrupt of Ctrl-C, cancels the task of the call, and the call
returns when that has ended: an answer is aborted, and its turn taken back unless it is kept. Engine, client and session
can be used as context managers; one that was not closed is closed when it is no longer referenced, or Python exits.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import trio

import trioengine.actors.engine
import trioengine.client.client
from trioengine.actors.power_change import Level, ModeName
from trioengine.actors.statistics import Statistics
from trioengine.core.completion import Chunk, Completion
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineClosed, EngineError
from trioengine.core.lifecycle import Power
from trioengine.core.options import EngineOptions, SamplingOptions
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.tag import TagName
from trioengine.text.conversation import Prompt

T = TypeVar("T")


class _Ended(Exception):
    """The loop has ended before the task."""


class _Task(Generic[T]):
    """A function that runs in the loop, and its result."""

    def __init__(self, function: Callable[..., Awaitable[T]], *args: object) -> None:
        self.scope = trio.CancelScope()
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._function = partial(function, *args)

    async def run(self) -> None:
        try:
            with self.scope:
                self.future.set_result(await self._function())
        except Exception as exc:
            self.future.set_exception(exc)
        finally:
            if not self.future.done():  # cancelled, by its caller or with the loop
                self.future.set_exception(_Ended())


class _Loop:
    """Trio in a thread, in which `opening` is entered and left; `resource` is what it gives."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._opening = opening
        self._token: concurrent.futures.Future[trio.lowlevel.TrioToken] = concurrent.futures.Future()
        self._opened: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._closing = trio.Event()
        self._starting = trio.CancelScope()
        self._calls: trio.Nursery | None = None  # while calls are taken
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trioengine", daemon=True)
        self._thread.start()
        try:
            self.resource = self._opened.result()
        except BaseException:  # also KeyboardInterrupt, in the middle of a download
            self._post(self._starting.cancel)
            self.close()
            raise

    def close(self) -> None:
        """Cancel every call, close the resource and wait for the thread's end; harmless when closed."""
        self._post(self._closing.set)
        if not self._is_own_thread:
            self._thread.join()

    def end_soon(self, end: Callable[[], object]) -> None:
        """Call this in the loop, unless it has ended."""
        self._post(end)

    def call(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run a function in the loop and wait for its result. Interrupted, it is cancelled."""
        with self.running(function, *args) as task:
            return self.result(task)

    def call_sync(self, function: Callable[..., T]) -> T:
        """Run a synchronous function in the loop."""

        async def run() -> T:
            return function()

        return self.call(run)

    @contextmanager
    def running(self, function: Callable[..., Awaitable[T]], *args: object) -> Iterator[_Task[T]]:
        """A task in the loop, which is cancelled and has ended when the block is left."""
        task = _Task(function, *args)
        try:
            if not self._post(partial(self._start, task)):
                task.future.set_exception(_Ended())
            yield task
        finally:
            if not task.future.done() and self._post(task.scope.cancel) and not self._is_own_thread:
                concurrent.futures.wait([task.future])

    def result(self, task: _Task[T]) -> T:
        """The task's result. Raises its error, and the failure that ended the loop before it, or EngineClosed."""
        try:
            return task.future.result()
        except _Ended:
            pass
        self._thread.join()
        if isinstance(self._failure, EngineError):
            raise copy(self._failure)
        raise EngineClosed("the engine is closed")

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:
            self._failure = exc
        if not self._token.done():
            self._token.set_exception(trio.RunFinishedError())
        if not self._opened.done():
            self._opened.set_exception(self._failure or EngineClosed("the engine was closed while it started"))

    async def _main(self) -> None:
        self._token.set_result(trio.lowlevel.current_trio_token())
        with self._starting:
            async with self._opening() as resource, trio.open_nursery() as self._calls:
                try:
                    self._opened.set_result(resource)
                    await self._closing.wait()
                    self._calls.cancel_scope.cancel()
                finally:
                    self._calls = None

    def _start(self, task: _Task[Any]) -> None:
        if self._calls is None:
            task.future.set_exception(_Ended())
        else:
            self._calls.start_soon(task.run)

    def _post(self, function: Callable[[], object]) -> bool:
        """Call this in the loop soon; False if the loop has ended."""
        with suppress(trio.RunFinishedError):
            self._token.result().run_sync_soon(function)
            return True
        return False

    @property
    def _is_own_thread(self) -> bool:
        """Whether this runs in the loop's thread, where a finalizer may run."""
        return threading.current_thread() is self._thread


class Generation:
    """One request, asked when it is iterated over: `for chunk in session.generate(...)`.

    Leaving the loop early, by `break` or an exception, aborts the request.
    """

    def __init__(self, session: Session, inner: Any) -> None:
        self._session = session  # which lives as long as this
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def __iter__(self) -> Iterator[Chunk]:
        """Ask, and give the answer in chunks. Raises as the asynchronous Generation does."""
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        loop = self._session.loop
        with loop.running(self._read, chunks.put) as task:
            task.future.add_done_callback(lambda _: chunks.put(None))
            while (chunk := chunks.get()) is not None:
                yield chunk
            loop.result(task)

    async def _read(self, put: Callable[[Chunk], None]) -> None:
        async with self._inner as generation:
            async for chunk in generation:
                put(chunk)

    def result(self) -> Completion:
        """Ask, read to the end and return the whole answer."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome; raises the typed error of a failed request."""
        completion: Completion = self._session.loop.call_sync(lambda: self._inner.completion)
        return completion

    def abort(self) -> None:
        """Ask for the end of this request, from any thread; harmless when it has one."""
        self._session.loop.call_sync(self._inner.abort)


class Session:
    """A conversation: `engine.open_session()`."""

    def __init__(self, host: _Host, options: Mapping[str, Any]) -> None:
        self.loop = host.loop
        self._host = host  # which lives as long as this
        self._inner: Any = self.loop.call_sync(partial(host.loop.resource.open_session, **options))
        weakref.finalize(self, self.loop.end_soon, self._inner.end).atexit = False
        self.loop.call(self._inner.__aenter__)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages."""
        return self.loop.call_sync(lambda: self._inner.history)

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation."""
        self.loop.call_sync(partial(self._inner.replace_history, messages))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be iterated over. The arguments are those of the asynchronous Session.generate."""
        options_of_call = {"keep_partial": keep_partial, "timeout": timeout, "wait": wait, **options}
        return Generation(self, self.loop.call_sync(partial(self._inner.generate, prompt, params, **options_of_call)))

    def ask(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One whole answer."""
        generation = self.generate(prompt, params, keep_partial=keep_partial, timeout=timeout, wait=wait, **options)
        return generation.result()

    def close(self) -> None:
        """End the session: a request in flight is aborted. Harmless when ended, also with the engine."""
        self.loop.end_soon(self._inner.end)


class _Host:
    """Base class of Engine and Client: opens sessions."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.loop = _Loop(opening)
        weakref.finalize(self, self.loop.close)  # also when Python exits

    def __repr__(self) -> str:
        return repr(self.loop.resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> Session:
        """An open session. The arguments are those of the asynchronous `open_session`."""
        return Session(self, {"label": label, "history": history, "wait": wait, "timeout": timeout})

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One answer, in a session of its own."""
        generate = partial(self.loop.resource.generate, prompt, params, timeout=timeout, wait=wait, **options)
        completion: Completion = self.loop.call(generate)
        return completion

    def close(self) -> None:
        """End every session, and wait until all is closed, the worker too. Harmless when closed."""
        self.loop.close()


class Client(_Host):
    """A server elsewhere: `connect(url)`."""


class Engine(_Host):
    """An engine of this process: `open_engine(model)`."""

    @property
    def state(self) -> Power:
        """The engine's state."""
        state: Power = self.loop.resource.state
        return state

    def statistics(self) -> Statistics:
        """The counts at this moment."""
        statistics: Statistics = self.loop.call_sync(self.loop.resource.statistics)
        return statistics

    def sleep(self, level: Level = 1, *, mode: ModeName = "abort", timeout: float | None = None) -> None:
        """Give the worker's memory back."""
        self.loop.call(partial(self.loop.resource.sleep, level, mode=mode, timeout=timeout))

    def wake(self, tags: TagName | Collection[TagName] | None = None, *, reload: bool = True) -> None:
        """Take memory back."""
        self.loop.call(partial(self.loop.resource.wake, tags, reload=reload))

    def update_weights(self, path: str | Path, *, mode: ModeName = "abort", timeout: float | None = None) -> None:
        """Go over to the weights at `path`."""
        self.loop.call(partial(self.loop.resource.update_weights, path, mode=mode, timeout=timeout))


def open_engine(
    config: EngineConfig | str | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine that is ready. Arguments and errors are those of the asynchronous `open_engine`.

    Interrupted, it is closed again. The callbacks are called in other threads.
    """
    given: Any = options
    opening = trioengine.actors.engine.open_engine
    return Engine(partial(opening, config, on_progress=on_progress, on_load=on_load, **given))


def connect(url: str, *, api_key: str | None = None, model: str | None = None) -> Client:
    """A client of the server at `url`. Arguments and errors are those of the asynchronous `connect`."""
    return Client(partial(trioengine.client.client.connect, url, api_key=api_key, model=model))
