"""Objects for `async with` only, or for `await` only: other uses raise an error that names the right form."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from trioengine.aio.concurrency import check_trio
from trioengine.core.types import Restricted

P = ParamSpec("P")
T = TypeVar("T")


class AsyncOnly(Restricted, refuses=("await", "with")):
    """Base class of objects for `async with` only."""

    __slots__ = ()


class Call(Restricted, Coroutine[Any, Any, T], refuses=("async with", "async for")):
    """The coroutine of a call that returns a whole answer."""

    _usage = "await the whole answer, or read chunks by `async with session.generate(...) as generation`"

    def __init__(self, function: str, inner: Coroutine[Any, Any, T]) -> None:
        self._noun = f"{function}()"
        self._inner = inner

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def _misused(self, how: str) -> TypeError:
        self.close()  # so that Python does not warn about it
        return super()._misused(how)


def whole_answer(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function to return a Call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return Call(function.__name__, function(*args, **kwargs))

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    return call


class Opening(AsyncOnly, AbstractAsyncContextManager[T], Generic[T]):
    """The result of a function such as `open_engine`, before it is entered."""

    def __init__(self, function: str, noun: str, inner: AbstractAsyncContextManager[T]) -> None:
        self._noun = f"{function}()"
        self._usage = f"use `async with {function}(...) as {noun}`"
        self._inner = inner

    def __repr__(self) -> str:
        return f"<{self._noun} not entered: {self._usage}>"

    async def __aenter__(self) -> T:
        """Raises RuntimeError outside of trio."""
        check_trio()
        return await self._inner.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc, traceback)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Raise AttributeError: only the opened object has attributes."""
            raise AttributeError(f"{self._noun} has no attribute {name!r} before it is entered: {self._usage}")


def opens(
    noun: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T]]]:
    """`asynccontextmanager`, with errors that name the right form; `noun` is a variable for the opened object."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
        opening = asynccontextmanager(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
            return Opening(function.__name__, noun, opening(*args, **kwargs))

        return call

    return decorate
