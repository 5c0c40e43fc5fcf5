"""Trio in a thread of its own, and calls into it that block: methods made of asynchronous ones, short tracebacks."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import trio

from trioengine.core.errors import (
    ConnectionLost,
    EngineClosed,
    EngineError,
    ModelError,
    RequestRejected,
    TransitionFailed,
)
from trioengine.core.restricted import Restricted

P = ParamSpec("P")
T = TypeVar("T")


class _Ended(Exception):
    """The loop has ended before the task."""


class Task(Generic[T]):
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


class Loop:
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
    def running(self, function: Callable[..., Awaitable[T]], *args: object) -> Iterator[Task[T]]:
        """A task in the loop, which is cancelled and has ended when the block is left."""
        task = Task(function, *args)
        try:
            if not self._post(partial(self._start, task)):
                task.future.set_exception(_Ended())
            yield task
        finally:
            if not task.future.done() and self._post(task.scope.cancel) and not self._is_own_thread:
                concurrent.futures.wait([task.future])

    def result(self, task: Task[T]) -> T:
        """The task's result. Raises its error, and the failure that ended the loop before it, or EngineClosed."""
        try:
            return task.future.result()
        except _Ended:
            pass
        except EngineClosed as exc:  # the engine has failed, and the loop is about to end
            if isinstance(exc.__cause__, EngineError):
                raise copy(exc.__cause__) from None
            raise
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

    def _start(self, task: Task[Any]) -> None:
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


H = TypeVar("H", bound="Handle")
SHORTENED = (EngineError, KeyboardInterrupt)  # any other exception is a bug, and needs its frames
_HOLDS_ITS_CAUSE = (ConnectionLost, ModelError, RequestRejected, TransitionFailed)  # a network or a file, no bug

logger = logging.getLogger("trioengine")


class Handle(Restricted, refuses=("await", "async with", "async for")):
    """Base class of the objects that stand for one in the loop, `inner`."""

    loop: Loop
    inner: Any

    def __repr__(self) -> str:
        return repr(self.inner)


def shortened(error: BaseException) -> BaseException:
    """The error without the frames of the loop and its thread; they are logged, at DEBUG.

    Its causes stay, and keep their frames where they are none of trioengine's own errors; but a cause goes whose reason
    the error's message holds.
    """
    logger.debug("the whole traceback of %s", type(error).__name__, exc_info=error)
    cause: BaseException | None = error
    while isinstance(cause, SHORTENED):
        cause.__traceback__ = cause.__context__ = None  # IPython shows no cell error for a context that is a group
        if isinstance(cause, _HOLDS_ITS_CAUSE):
            cause.__cause__ = None
        cause = cause.__cause__
    return error


def shortens(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose errors come out of it with this frame alone."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except SHORTENED as error:
            raise shortened(error) from error.__cause__

    return call


def awaited(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Handle, P], T]:
    """The coroutine method as one that blocks, with the same arguments, result and errors."""

    @shortens
    @functools.wraps(method)
    def call(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run: Callable[[], Awaitable[T]] = partial(getattr(self.inner, method.__name__), *args, **kwargs)
        return self.loop.call(run)

    return call


def posted(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Handle, P], T]:
    """The method, called in the loop."""

    @shortens
    @functools.wraps(method)
    def call(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run: Callable[[], T] = partial(getattr(self.inner, method.__name__), *args, **kwargs)
        return self.loop.call_sync(run)

    return call


def opened(
    method: Callable[Concatenate[Any, P], object], opens: Callable[[H, Any], T]
) -> Callable[Concatenate[H, P], T]:
    """The method, called in the loop; its result is given to `opens`."""

    @shortens
    @functools.wraps(method)
    def call(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return opens(self, self.loop.call_sync(partial(getattr(self.inner, method.__name__), *args, **kwargs)))

    return call
