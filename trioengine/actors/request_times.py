"""The times of one request, as its observers are told them."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.core.types import Usage


class RequestTimes:
    """When a request began, and got its first and its latest token."""

    __slots__ = ("_began", "_first", "_latest", "_observers")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._began = self._first = self._latest = 0.0

    def begin(self) -> None:
        self._began = trio.current_time()

    def on_tokens(self, now: float, usage: Usage | None, *, are_first: bool) -> None:
        """A part of the answer came."""
        if are_first:
            self._first = now
            for observer in self._observers:
                observer.first_token(now - self._began, usage)
        else:
            for observer in self._observers:
                observer.next_tokens(now - self._latest)
        self._latest = now

    def resume(self) -> None:
        """The request goes on after its worker was lost."""
        for observer in self._observers:
            observer.request_resumed()

    def finish(self, prompt_tokens: int, generation_tokens: int) -> None:
        """The request ran to its end, with its latest token."""
        seconds, decode_seconds = self._latest - self._began, self._latest - self._first
        finished = FinishedRequest(seconds, decode_seconds, prompt_tokens, generation_tokens)
        for observer in self._observers:
            observer.request_finished(finished)
