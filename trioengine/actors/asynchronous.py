"""Objects that only `async with` enters: another use raises an error that names the right form."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AsyncOnly:
    """Base class of objects that only `async with` enters. Type checkers see none of the methods for wrong uses."""

    __slots__ = ()
    _noun: str  # as in "a session"
    _usage: str  # as in "use `async with …`"

    if not TYPE_CHECKING:

        def __await__(self):
            """Raise TypeError: it is entered, not awaited."""
            raise self._misused("awaited")

        def __enter__(self):
            """Raise TypeError: it is entered by `async with`."""
            raise self._misused("entered by `with`")

        def __exit__(self, exc_type, exc, traceback):
            """Python looks for it before it calls `__enter__`."""

    def _misused(self, how: str) -> TypeError:
        return TypeError(f"{self._noun} cannot be {how}: {self._usage}")


class Opening(AsyncOnly, AbstractAsyncContextManager[T], Generic[T]):
    """The result of a function such as `open_engine`, before it is entered."""

    def __init__(self, function: str, noun: str, inner: AbstractAsyncContextManager[T]) -> None:
        self._noun = f"{function}()"
        self._usage = f"use `async with {function}(...) as {noun}`"
        self._inner = inner

    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc, traceback)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Raise AttributeError: what it opens has the attributes."""
            raise AttributeError(f"{self._noun} has no attribute {name!r} before it is entered: {self._usage}")


def opens(
    noun: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T]]]:
    """`asynccontextmanager`, with errors that name the right form; `noun` is the name of what is opened."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
        opening = asynccontextmanager(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
            return Opening(function.__name__, noun, opening(*args, **kwargs))

        return call

    return decorate
