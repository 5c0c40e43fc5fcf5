"""The base class of machines from which users derive classes: it protects the names of its own."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

from hypothesis.stateful import RULE_MARKER

from trioengine.testing.fuzz.machine import Machine

_PACKAGES = ("trioengine", "hypothesis")
_TO_OVERRIDE = {
    *("app", "serve", "client", "check", "let_go", "make_engine", "teardown", "config", "limits", "port", "horizon"),
    *("longest", "keeps_sessions", "keeps_tasks", "num_variants", "variant", "reachable"),
}


class DerivedMachine(Machine):
    """Refuses a name in a class of the user's, or in its objects, that a rule, a method or an attribute of ours has.

    A rule that was replaced would be a fault that is never injected. None in the place of a rule switches it off.
    """

    _is_made = False  # our part

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError for a name that is taken."""
        super().__init_subclass__(**options)
        base = _base(cls)
        for name, value in itertools.chain.from_iterable(vars(each).items() for each in _users_classes(cls)):
            if hasattr(base, name) and not _may_replace(name, value, getattr(base, name)):
                raise TypeError(_taken(cls, name))
        if not _is_ours(cls.__module__) and "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", _closing(vars(cls)["__init__"]))

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError for a name that is taken, if code of the user's sets it."""
        taken: set[str] = vars(self).setdefault("_taken", set())  # names of attributes that our part has set
        if _is_ours(_setter()):
            taken.add(name)
        elif name not in _TO_OVERRIDE and (name in taken or hasattr(_base(type(self)), name)):
            raise AttributeError(_taken(type(self), name))
        super().__setattr__(name, value)

    def _check_names(self) -> None:
        """Raises TypeError if a class of the user's has the name of an attribute; our part has been made."""
        for name in itertools.chain.from_iterable(vars(each) for each in _users_classes(type(self))):
            if name in vars(self)["_taken"] and name not in _TO_OVERRIDE and not name.startswith("__"):
                self._give_up()
                raise TypeError(_taken(type(self), name))
        self._is_made = True

    def _give_up(self) -> None:
        """Leave no loop behind, in which the next machine could not begin."""
        self._close()
        self._taps.close()


def _may_replace(name: str, value: object, ours: object) -> bool:
    is_switched_off = value is None and hasattr(ours, RULE_MARKER)
    return name in _TO_OVERRIDE or name.startswith("__") or is_switched_off or value is ours


def _taken(machine: type, name: str) -> str:
    return f"{machine.__name__}.{name}: {_base(machine).__name__} has this name already; choose another one"


def _closing(init: Callable[..., None]) -> Callable[..., None]:
    """The same `__init__`, which leaves no loop behind if it raises."""

    @functools.wraps(init)
    def made(self: DerivedMachine, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException:
            if self._is_made:
                self._give_up()
            raise

    return made


def _setter() -> str:
    """The module whose code sets an attribute, whatever `__setattr__` of the user's is between."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__setattr__" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _users_classes(machine: type) -> list[type]:
    """Its classes that come before the first one of ours."""
    return list(itertools.takewhile(lambda each: not _is_ours(each.__module__), machine.__mro__))


def _base(machine: type) -> type:
    return next(each for each in machine.__mro__ if _is_ours(each.__module__))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES
