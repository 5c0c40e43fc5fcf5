"""The times of requests and of their tokens, as observers get them: in seconds, on trio's clock."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.core.types import Usage


class StepTimes:
    """The time at which a step of the worker was received, and the gaps in answers that end with it."""

    __slots__ = ("gaps", "now")

    def __init__(self) -> None:
        self.now = trio.current_time()
        self.gaps: list[float] = []  # since the part of the answer before; one for each answer that goes on


class RequestTimes:
    """When a request began, and got its first and its latest token."""

    __slots__ = ("_began", "_first", "_latest", "_observers")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._began = self._first = self._latest = 0.0

    def begin(self) -> None:
        self._began = trio.current_time()

    def on_tokens(self, step: StepTimes, usage: Usage | None, *, are_first: bool) -> None:
        """A part of the answer came."""
        now = step.now
        if are_first:
            self._first = now
            for observer in self._observers:
                observer.first_token(now - self._began, usage)
        else:
            step.gaps.append(now - self._latest)
        self._latest = now

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the latest."""
        return self._latest - self._first

    def resume(self) -> None:
        """The request goes on after its worker was lost."""
        for observer in self._observers:
            observer.request_resumed()

    def finish(self, prompt_tokens: int, generation_tokens: int) -> None:
        """The request ran to its end, with its latest token."""
        finished = FinishedRequest(self._latest - self._began, self.decode_time, prompt_tokens, generation_tokens)
        for observer in self._observers:
            observer.request_finished(finished)
