"""One request as its client saw it, and the stopwatch that it is taken with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import trio

from trioengine.cli.bench.departure import Departure, Moment


class End(enum.Enum):
    """How a request ended."""

    COMPLETED = "completed"
    LEFT = "left"  # its client did, as it was told to
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds, by vLLM's definitions.

    TTFT: from the beginning, before there is a connection, to the first piece of text. ITL: between two pieces of text.
    E2EL: to the last event. TPOT: what a token after the first took on average.
    """

    end: End
    began: float  # since the run began
    ttft: float  # 0 if there was no text
    itl: tuple[float, ...]
    e2el: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @property
    def tpot(self) -> float:
        """0 for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Stopwatch:
    """What a backend tells of a request as it goes on, within `scope`, which is cancelled when the client leaves."""

    def __init__(self, departure: Departure | None = None) -> None:
        self.scope = trio.CancelScope()
        self._departure = departure
        self._began = trio.current_time()
        self._texts: list[float] = []  # when each piece came
        self._last = self._began
        self._usage: tuple[int, int] | None = None

    def sent(self) -> None:
        """The request is on its way."""
        if self._departure is None:
            return
        match self._departure.moment:
            case Moment.AT_ONCE:
                self.scope.cancel()
            case Moment.BEFORE_THE_FIRST:
                self.scope.deadline = trio.current_time() + self._departure.seconds

    def text(self) -> None:
        """A piece of text came."""
        self.event()
        self._texts.append(self._last)
        if self._departure is not None and len(self._texts) >= self._departure.texts:
            self.scope.cancel()

    def event(self) -> None:
        """Something else came that belongs to the answer."""
        self._last = trio.current_time()

    def usage(self, prompt_tokens: int, output_tokens: int) -> None:
        """What the server has counted."""
        self.event()
        self._usage = prompt_tokens, output_tokens

    def sample(self, run_began: float, error: str | None = None) -> Sample:
        """What was seen; to be asked when the request is over."""
        if self.scope.cancelled_caught:
            end, error = End.LEFT, None
        elif error is None and self._usage is None:
            end, error = End.FAILED, "the server has not said how many tokens it was (usage)"
        else:
            end = End.COMPLETED if error is None else End.FAILED
        prompt_tokens, output_tokens = self._usage or (0, 0)
        return Sample(
            end=end,
            began=self._began - run_began,
            ttft=self._texts[0] - self._began if self._texts else 0.0,
            itl=tuple(after - before for before, after in zip(self._texts, self._texts[1:], strict=False)),
            e2el=self._last - self._began,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            error=error,
        )
