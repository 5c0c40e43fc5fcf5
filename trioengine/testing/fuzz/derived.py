"""The base class of machines from which users derive classes: it protects the names of its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from trioengine.testing.fuzz.machine import Machine

_PACKAGES = ("trioengine", "hypothesis")
_TO_OVERRIDE = {
    *("app", "serve", "client", "check", "let_go", "teardown", "config", "limits", "port", "horizon", "longest"),
    *("keeps_sessions", "keeps_tasks", "num_variants", "variant", "reachable"),
}


class DerivedMachine(Machine):
    """Refuses a name in a class of the user's, or in its objects, that a rule, a method or an attribute of ours has.

    A rule that was replaced would be a fault that is never injected. None in the place of a rule switches it off.
    """

    _reserved: frozenset[str] = frozenset()  # attributes that our part has set

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError for a name that is taken."""
        super().__init_subclass__(**options)
        if _is_ours(cls.__module__):
            return
        base = _base(cls)
        for name, value in vars(cls).items():
            if value is not None and not name.startswith("__") and name not in _TO_OVERRIDE and hasattr(base, name):
                raise TypeError(f"{cls.__name__}.{name}: {base.__name__} has this name already; choose another one")
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", _closing(vars(cls)["__init__"]))

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError for a name that is taken, if code of the user's sets it."""
        is_taken = name in self._reserved or hasattr(_base(type(self)), name)
        if is_taken and name not in _TO_OVERRIDE and not _is_ours(sys._getframe(1).f_globals["__name__"]):
            where = f"{type(self).__name__}, self.{name}"
            raise AttributeError(f"{where}: {_base(type(self)).__name__} has this name already; choose another one")
        super().__setattr__(name, value)

    def _reserve_names(self) -> None:
        """From now on the attributes that are set are the user's to replace, and those before are not."""
        self._reserved = frozenset(vars(self))


def _closing(init: Callable[..., None]) -> Callable[..., None]:
    """The same `__init__`, which leaves no loop behind if it raises."""

    @functools.wraps(init)
    def made(self: DerivedMachine, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException:
            if self._reserved:  # our part has been made
                self._close()
                self._taps.close()
            raise

    return made


def _base(machine: type[DerivedMachine]) -> type:
    """The first of its classes that is ours."""
    return next(each for each in machine.__mro__ if _is_ours(each.__module__))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES
