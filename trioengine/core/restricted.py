"""Objects that one statement of Python uses: another one raises an error that names the right form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

_USES = {  # statements: how an error calls them, and the methods that Python looks for
    "await": ("awaited", ("__await__",)),
    "with": ("entered by `with`", ("__enter__", "__exit__")),
    "async with": ("entered by `async with`", ("__aenter__", "__aexit__")),
    "for": ("iterated over by `for`", ("__iter__",)),
    "async for": ("iterated over by `async for`", ("__aiter__",)),
    "next": ("given to `next`", ("__next__",)),
}


class Restricted:
    """Base class of such objects: `class Session(Restricted, refuses=("await", "with"))`.

    Such a use raises TypeError. For a type checker it is not there.
    """

    __slots__ = ()
    _noun: str  # as in "a session"
    _usage: str  # as in "use `async with …`"

    def __init_subclass__(cls, *, refuses: Iterable[str] = ()) -> None:
        super().__init_subclass__()
        for use in refuses:
            how, methods = _USES[use]
            for method in methods:
                setattr(cls, method, _refusal(how))

    def _misused(self, how: str) -> TypeError:
        return TypeError(f"{self._noun} cannot be {how}: {self._usage}")


def _refusal(how: str) -> Callable[..., NoReturn]:
    def refuse(self: Restricted, *_: object) -> NoReturn:
        raise self._misused(how)

    return refuse
