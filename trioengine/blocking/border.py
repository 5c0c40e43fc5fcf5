"""Where calls come out of the loop: methods that block, made of asynchronous ones, and short tracebacks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from trioengine.blocking.loop import Loop
from trioengine.core.errors import ConnectionLost, EngineError, ModelError, RequestRejected, TransitionFailed
from trioengine.core.types import Restricted

P = ParamSpec("P")
T = TypeVar("T")
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
