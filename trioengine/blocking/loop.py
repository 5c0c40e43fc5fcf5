"""Trio in a thread of its own, and methods that block on calls into it, with short tracebacks."""

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
from trioengine.core.types import Restricted

P = ParamSpec("P")
T = TypeVar("T")


class _Ended(Exception):
    """The loop ended before the task."""


class Task(Generic[T]):
    """A function call in the loop, and its result."""

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
    """Runs trio in a thread, which enters and leaves `opening`; `resource` is the object that it opens."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._opening = opening
        self._token: concurrent.futures.Future[trio.lowlevel.TrioToken] = concurrent.futures.Future()
        self._opened: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._closing = trio.Event()
        self._starting = trio.CancelScope()
        self._calls: trio.Nursery | None = None  # of the calls; None before opening and after closing
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trioengine", daemon=True)
        self._thread.start()
        try:
            self.resource = self._opened.result()
        except BaseException:  # KeyboardInterrupt in the middle of a download, for example
            self._post(self._starting.cancel)
            self.close()
            raise

    def close(self) -> None:
        """Cancel every call, close the resource and wait for the thread to end; harmless when closed."""
        self._post(self._closing.set)
        if not self._is_own_thread:
            self._thread.join()

    def end_soon(self, end: Callable[[], object]) -> None:
        """Call `end` in the loop, without waiting, unless the loop has ended."""
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
        """Run a task in the loop for the block; leaving the block cancels it and waits for its end."""
        task = Task(function, *args)
        try:
            if not self._post(partial(self._start, task)):
                task.future.set_exception(_Ended())
            yield task
        finally:
            if not task.future.done() and self._post(task.scope.cancel) and not self._is_own_thread:
                concurrent.futures.wait([task.future])

    def result(self, task: Task[T]) -> T:
        """Wait for the task's result.

        Raises its error; if the loop ended before it, the failure that ended the loop, or EngineClosed.
        """
        try:
            return task.future.result()
        except _Ended:
            pass
        except EngineClosed as exc:  # the engine failed, and the loop is about to end
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
        """Call the function in the loop soon. Returns False if the loop has ended."""
        with suppress(trio.RunFinishedError):
            self._token.result().run_sync_soon(function)
            return True
        return False

    @property
    def _is_own_thread(self) -> bool:
        """Whether the caller is in the loop's thread: a finalizer may be."""
        return threading.current_thread() is self._thread


H = TypeVar("H", bound="Handle")
SHORTENED = (EngineError, KeyboardInterrupt)  # other exceptions are bugs, and need their frames
_HOLDS_ITS_CAUSE = (ConnectionLost, ModelError, RequestRejected, TransitionFailed)  # of a network or a file: not a bug

logger = logging.getLogger("trioengine")


class Handle(Restricted, refuses=("await", "async with", "async for")):
    """Base class of the blocking handles; `inner` is the asynchronous object in the loop."""

    loop: Loop
    inner: Any

    def __repr__(self) -> str:
        return repr(self.inner)


def shortened(error: BaseException) -> BaseException:
    """Remove the frames of the loop and its thread from the error, and log them at DEBUG.

    Causes stay, unless the error's message repeats their reason. The first cause that is not one of trioengine's own
    errors keeps its frames, and so do the causes behind it.
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
    """Decorate the function: its errors are raised with this frame only."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except SHORTENED as error:
            raise shortened(error) from error.__cause__

    return call


def awaited(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Handle, P], T]:
    """Make a blocking method of the coroutine method, with the same arguments, result and errors."""

    @shortens
    @functools.wraps(method)
    def call(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run: Callable[[], Awaitable[T]] = partial(getattr(self.inner, method.__name__), *args, **kwargs)
        return self.loop.call(run)

    return call


def posted(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Handle, P], T]:
    """Make a method that calls the method in the loop."""

    @shortens
    @functools.wraps(method)
    def call(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run: Callable[[], T] = partial(getattr(self.inner, method.__name__), *args, **kwargs)
        return self.loop.call_sync(run)

    return call


def opened(
    method: Callable[Concatenate[Any, P], object], opens: Callable[[H, Any], T]
) -> Callable[Concatenate[H, P], T]:
    """Make a method that calls the method in the loop and passes its result to `opens`."""

    @shortens
    @functools.wraps(method)
    def call(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return opens(self, self.loop.call_sync(partial(getattr(self.inner, method.__name__), *args, **kwargs)))

    return call
