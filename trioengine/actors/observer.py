"""The observer: is told what happens in an engine, and how long it took. The front makes its histograms of this."""

from __future__ import annotations

from dataclasses import dataclass

from trioengine.core.types import Usage


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ran to its end (stop or length), and whose slot is free."""

    seconds: float  # from its beginning to its last token
    decode_seconds: float  # from its first token to its last
    prompt_tokens: int
    generation_tokens: int


class Observer:
    """Its methods are called in the step in which it happens, some for every token; they must not block or raise.

    Each does nothing unless overridden. Times are in seconds, by trio's clock. A request begins when its Generation is
    entered: its time to the first token contains the wait for a slot, if there was one.
    """

    def step(self, num_tokens: int) -> None:
        """The worker made a step, and computed so many tokens of prompts and answers."""

    def first_token(self, seconds: float, usage: Usage | None) -> None:
        """A request got its first token; `usage` says how long that took on the worker."""

    def next_tokens(self, seconds: float) -> None:
        """A request got more of its answer, so long after what it got before."""

    def request_resumed(self) -> None:
        """A request whose worker was lost goes on with the next one."""

    def request_finished(self, request: FinishedRequest) -> None:
        """A request ran to its end."""

    def session_stopped(self, seconds: float) -> None:
        """The worker let go of what it was told to stop or to end, so long after that was posted."""
