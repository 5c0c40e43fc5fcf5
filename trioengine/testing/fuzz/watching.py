"""What is watched inside the server while a machine runs, where a look at rest would come too late, or made to fail.

Each is a `mutate` for `Machine._watch`; what it sees wrong is added to the crashes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from trioengine.actors.generation import Generation
from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ByteBudget, InFlight
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.events import ClientEvent, ResponseCancel
from trioengine.serve.realtime.outbox import DeltaTemplate, Outbox
from trioengine.serve.realtime.response import Response, ResponseStatus
from trioengine.testing.fuzz.callers import UNPREPARED, Oops
from trioengine.testing.fuzz.oracles import GOING
from trioengine.text.conversation import Conversation, Prepared, Prompt

Crashes: TypeAlias = list[Exception]

BETWEEN = 1024  # characters that what a client asked for may take, between a look for room and a text


def failing(prepare: Any) -> Any:
    """For `Conversation.prepare`: as where a template or a tokenizer has a bug."""

    def watched(conversation: Conversation, prompt: Prompt, limit: int | None, ratio: float) -> Prepared:
        if UNPREPARED in (prompt, _shown_text(prompt)):
            raise Oops
        prepared: Prepared = prepare(conversation, prompt, limit, ratio)
        return prepared

    return watched


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


def _shown_text(prompt: Prompt) -> object:
    """The text behind the pictures of a prompt."""
    match prompt:
        case [{"content": [*_, {"text": text}]}]:
            return text
    return None


class Cancels:
    """What clients of the server have cancelled, as far as it has read that; not what it has made of it."""

    def __init__(self, crashes: Crashes) -> None:
        self._crashes = crashes
        self._cancelled: list[Response] = []  # and not over

    def of_events(self, act: Any) -> Any:
        """For `RealtimeConnection._act`: what is cancelled is stopped in the same step."""

        def watched(connection: RealtimeConnection, event: ClientEvent, event_id: str | None) -> None:
            response = _to_cancel(connection, event) if isinstance(event, ResponseCancel) else None
            act(connection, event, event_id)
            if response is not None:
                self._cancelled.append(response)
                try:
                    self.check()
                except AssertionError as exc:
                    self._crashes.append(exc)

        return watched

    def check(self) -> None:
        """None of them goes on; one whose request is still on its way in is stopped once it is there."""
        self._cancelled = [each for each in self._cancelled if each.status is ResponseStatus.IN_PROGRESS]
        for response in self._cancelled:
            generation = response.generation
            if generation is not None:
                goes_on = generation._session.phase in GOING
                assert not goes_on, f"{response.id} was cancelled, and goes on"


def _to_cancel(connection: RealtimeConnection, event: ResponseCancel) -> Response | None:
    """Without an id it is the conversation's."""
    running = connection._in_conversation.active
    if event.response_id is None:
        return running[0] if running else None
    found = (response for response in (*running, *connection._out_of_band.active) if response.id == event.response_id)
    return next(found, None)


def _is_stopping(generation: Generation) -> bool:
    session = generation._session
    return session.generation is generation and session.phase not in GOING


def stopping(crashes: Crashes, saw: Callable[[bool], None]) -> Callable[[Any], Any]:
    """For `InFlight.abort`: what goes on is stopped in the same step, and it is said whether anything was."""

    def mutate(abort: Any) -> Any:
        def watched(in_flight: InFlight, id: str) -> int:
            generations = list(in_flight._generations.get(id, ()))
            due = sum(generation.outcome is None and not _is_stopping(generation) for generation in generations)
            told: int = abort(in_flight, id)
            if told != due:
                crashes.append(AssertionError(f"an operator was told {told} of {generations}"))
            for generation in generations:
                session = generation._session
                if session.generation is generation and session.phase in GOING:
                    crashes.append(AssertionError(f"an operator has aborted it, and it goes on: {session}"))
            saw(told > 0)
            return told

        return watched

    return mutate


def noting(saw: Callable[[], None]) -> Callable[[Any], Any]:
    """For any method: `saw` is called before it."""

    def mutate(method: Any) -> Any:
        def watched(*args: Any) -> Any:
            saw()
            return method(*args)

        return watched

    return mutate


def noting_refusals(saw: Callable[[], None]) -> Callable[[Any], Any]:
    """For `ByteBudget.check_room`: bytes of a client are refused."""

    def mutate(check_room: Any) -> Any:
        def watched(budget: ByteBudget, key: bytes | None, size: int) -> None:
            try:
                check_room(budget, key, size)
            except OverBudget:
                saw()
                raise

        return watched

    return mutate


class CrashLog:
    """For a `logger` of the server's: what it would log as an error is a finding."""

    def __init__(self, crashes: Crashes) -> None:
        self._crashes = crashes

    def info(self, *args: object) -> None:
        """Nothing that is wrong."""

    debug = info

    def error(self, message: str, *args: object, exc_info: Exception) -> None:
        self._crashes.append(exc_info)

    def exception(self, message: str, *args: object) -> None:
        self._crashes.append(AssertionError(message % args))
