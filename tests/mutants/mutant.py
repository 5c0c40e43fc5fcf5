"""A mutant, and the two ways to replace a piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from trioengine.core.lifecycle import SESSION_IGNORES, SESSION_TRANSITIONS, Attachment, Event, Phase, Transition
from trioengine.testing.fuzz import inside


@dataclass(frozen=True)
class Mutant:
    """A bug: while `active()` is entered, it is there, and a machine of this name can find it."""

    id: str
    failure: str
    active: Callable[[], AbstractContextManager[None]]
    shows: str  # how a finding names its consequences, as a regular expression for `search`
    machine: str = "EngineMachine"

    def explains(self, failure: Exception | None) -> bool:
        """Whether this is a finding of its consequences, not of another bug, nor of a mistake in the mutant."""
        return failure is not None and re.search(self.shows, f"{type(failure).__name__}: {failure}") is not None


def replaced(owner: Any, name: str, mutate: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[None]]:
    """The attribute becomes `mutate(attribute)`."""
    return partial(inside.replaced, owner, name, mutate)


def rewritten(
    phase: Phase, attachment: Attachment, event: Event, transition: Transition
) -> Callable[[], AbstractContextManager[None]]:
    """The session table has another transition there."""

    @contextmanager
    def active() -> Iterator[None]:
        table: Any = SESSION_TRANSITIONS
        original = table[phase, attachment, event]
        table[phase, attachment, event] = transition
        try:
            yield
        finally:
            table[phase, attachment, event] = original

    return active


def not_ignored(event: Event, phase: Phase) -> Callable[[], AbstractContextManager[None]]:
    """The event is illegal in this phase where the session table has no row for it."""

    @contextmanager
    def active() -> Iterator[None]:
        ignores: Any = SESSION_IGNORES
        original = ignores[event]
        ignores[event] = original - {phase}
        try:
            yield
        finally:
            ignores[event] = original

    return active


def together(*parts: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """All of them at once."""

    @contextmanager
    def active() -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part())
            yield

    return active
