"""What is watched inside the server while a machine runs, where a look at rest would come too late.

Each is a `mutate` for `replaced`; what it sees wrong is added to the crashes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from trioengine.serve.realtime.beside import Beside
from trioengine.serve.realtime.outbox import DeltaTemplate, Outbox
from trioengine.serve.realtime.responder import Responder

Crashes: TypeAlias = list[Exception]

BETWEEN = 1024  # characters that what a client asked for may take, between a look for room and a text


def with_room(crashes: Crashes, room: int) -> Callable[[Any], Any]:
    """For `Outbox.put_delta`: a slow client fills no memory, as texts wait for room."""

    def mutate(put_delta: Any) -> Any:
        def watched(outbox: Outbox, template: DeltaTemplate, delta: str) -> None:
            if outbox._size > room + BETWEEN:
                crashes.append(AssertionError(f"{outbox._size} characters are kept for a slow client"))
            put_delta(outbox, template, delta)

        return watched

    return mutate


def when_full(room: int, is_full: Callable[[], None]) -> Callable[[Any], Any]:
    """For `Outbox.put`: something is said to a client that has not read what was said before."""

    def mutate(put: Any) -> Any:
        def watched(outbox: Outbox, name: str, **fields: Any) -> None:
            if outbox._size > room:
                is_full()
            put(outbox, name, **fields)

        return watched

    return mutate


def collected(responders: list[Responder | Beside]) -> Callable[[Any], Any]:
    """For their `__init__`: all that there are."""

    def mutate(init: Any) -> Any:
        def watched(responder: Responder | Beside, *args: Any) -> None:
            init(responder, *args)
            responders.append(responder)

        return watched

    return mutate


class CrashLog:
    """For a `logger` of the server's: what it would log as an error is a finding."""

    def __init__(self, crashes: Crashes) -> None:
        self._crashes = crashes

    def info(self, *args: object) -> None:
        """Nothing that is wrong."""

    def error(self, message: str, *args: object, exc_info: Exception) -> None:
        self._crashes.append(exc_info)

    def exception(self, message: str, *args: object) -> None:
        self._crashes.append(AssertionError(message % args))
