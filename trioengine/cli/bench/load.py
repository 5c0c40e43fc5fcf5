"""The load of `bench serve`: requests that begin on time, each measured until it is over.

`plan` draws the jobs from the configuration's seed: random prompts of a given length, arrival times, and the clients
that leave early. `run_load` runs them through a `Backend`, which reports to a `Stopwatch` per request; a Stopwatch
yields a `Sample`.
"""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.http_client import RequestError
from trioengine.hub.known_models import SMOLLM2, trioengine_home
from trioengine.hub.model_info import read_model
from trioengine.text.tokenizer import Tokenizer

PATIENCE = 1.0  # seconds; the longest wait for the first token of a client that leaves before it
_PLAIN = """
air arm art bad bag bed big bit box boy bus buy car cat cold cup cut dark day deep dog door down dry ear east eat egg
end eye face far fast fat fish five fly food foot four full game girl give gold good green hair half hand hard hat
"""
_WORD = re.compile(r" [a-z]+")


class Moment(enum.Enum):
    """When a client leaves."""

    AT_ONCE = enum.auto()  # its request is sent; a busy server has queued it
    BEFORE_THE_FIRST = enum.auto()  # after some time, or at the first piece of text if that comes earlier
    IN_THE_MIDDLE = enum.auto()  # after some pieces of text


@dataclass(frozen=True, slots=True)
class Departure:
    """A client leaves at `moment`, at the latest after `texts` pieces of text."""

    moment: Moment
    seconds: float = 0.0
    texts: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come, `at` seconds after the beginning; `departure` is None for a client that stays."""

    prompt: str
    at: float
    departure: Departure | None = None


class End(enum.Enum):
    """How a request ended."""

    COMPLETED = "completed"
    LEFT = "left"  # its client left, as planned
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; times in seconds, by vLLM's definitions.

    TTFT: from the beginning, before there is a connection, to the first piece of text. ITL: between two pieces of text.
    E2EL: to the last event. TPOT: the mean time of a token after the first.
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


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of a load. `seconds` to the end of the last request; `max_concurrency`: most requests at a time."""

    seconds: float
    samples: tuple[Sample, ...]  # in the order of their jobs
    max_concurrency: int


class Stopwatch:
    """Measures one request, within `scope`, which is cancelled when the client leaves."""

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
        """Another part of the answer came."""
        self._last = trio.current_time()

    def usage(self, prompt_tokens: int, output_tokens: int) -> None:
        """The server's token counts came."""
        self.event()
        self._usage = prompt_tokens, output_tokens

    def sample(self, run_began: float, error: str | None = None) -> Sample:
        """The measurements, once the request is over."""
        if self.scope.cancelled_caught:
            end, error = End.LEFT, None
        elif error is None and self._usage is None:
            end, error = End.FAILED, "the server sent no token counts (usage)"
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


class Backend(Protocol):
    """The client's side of one server protocol."""

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """Send one request and read its answer, reporting to `watch`. Cancelled, its connection is closed at once.

        Raises RequestError.
        """
        ...


async def run_load(backend: Backend, jobs: Sequence[Job], max_concurrency: int | None = None) -> Run:
    """Run each job at its time, or later while `max_concurrency` are in flight; its own times count from then."""
    load = _Load(backend, max_concurrency)
    began = trio.current_time()
    await load.run(jobs)
    samples = tuple(load.samples[index] for index in range(len(jobs)))
    return Run(trio.current_time() - began, samples, load.peak)


async def take_sample(backend: Backend, job: Job, run_began: float) -> Sample:
    """Run one request to its end."""
    watch = Stopwatch(job.departure)
    error = None
    with watch.scope:
        try:
            await backend.ask(job.prompt, watch)
        except RequestError as exc:
            error = str(exc)
    return watch.sample(run_began, error)


class _Load:
    def __init__(self, backend: Backend, max_concurrency: int | None) -> None:
        self.samples: dict[int, Sample] = {}
        self.peak = 0
        self._backend = backend
        self._began = trio.current_time()
        self._running = 0
        self._slots: AbstractAsyncContextManager[object] = (
            nullcontext() if max_concurrency is None else trio.CapacityLimiter(max_concurrency)
        )

    async def run(self, jobs: Sequence[Job]) -> None:
        async with trio.open_nursery() as nursery:
            for index, job in enumerate(jobs):
                await trio.sleep_until(self._began + job.at)
                nursery.start_soon(self._request, index, job)

    async def _request(self, index: int, job: Job) -> None:
        async with self._slots:
            self._running += 1
            self.peak = max(self.peak, self._running)
            self.samples[index] = await take_sample(self._backend, job, self._began)
            self._running -= 1


class LengthUnit(enum.Enum):
    """The unit of a prompt's length."""

    TOKENS = "the default model's tokens"
    WORDS = "words: the default model's tokenizer is not there (trioengine pull)"


class Prompts:
    """A vocabulary of words to draw prompts from.

    The default model's tokenizer holds each word as one token, so that for this model the length is exact.
    """

    def __init__(self, words: Sequence[str], unit: LengthUnit) -> None:
        self.unit = unit
        self._words = words

    @classmethod
    def find(cls) -> Prompts:
        """Use the default model's tokenizer if its file is on this machine; blocks for less than a second."""
        path: Path = trioengine_home() / SMOLLM2.location
        if not path.is_file():
            return cls([f" {word}" for word in _PLAIN.split()], LengthUnit.WORDS)
        model = read_model(path)
        return cls(_single_tokens(model.tokenizer, model.vocab_size), LengthUnit.TOKENS)

    def draw(self, rng: random.Random, length: int) -> str:
        """A prompt of `length` tokens, or words."""
        return "".join(rng.choices(self._words, k=length))


def plan(config: BenchConfig, prompts: Prompts) -> list[Job]:
    """The jobs of a configuration; the same for the same seed. Prompts are the same with and without `--leave`."""
    rng = random.Random(config.seed)
    texts = [prompts.draw(rng, config.random_input_len) for _ in range(config.num_prompts)]
    times = arrivals(rng, config.num_prompts, config.request_rate, config.burstiness)
    leaving = departures(rng, config.num_prompts, config.leave, config.random_output_len)
    return [Job(*job) for job in zip(texts, times, leaving, strict=True)]


def arrivals(rng: random.Random, num_prompts: int, rate: float, burstiness: float) -> list[float]:
    """When requests begin, in seconds from the beginning, ascending; all 0 if the rate is infinite.

    The gaps are gamma distributed with the shape `burstiness`: with 1, a Poisson process. As in vLLM they are scaled so
    that the last request begins after `num_prompts / rate`, whatever the seed.
    """
    if rate == math.inf:
        return [0.0] * num_prompts
    at, times = 0.0, []
    for _ in range(num_prompts):
        at += rng.gammavariate(burstiness, 1.0)
        times.append(at)
    scale = num_prompts / rate / at if at else 0.0
    return [time * scale for time in times]


def departures(rng: random.Random, num_prompts: int, percent: float, output_len: int) -> list[Departure | None]:
    """For each request, when its client leaves; None: it stays. Exactly that share leaves, rounded."""
    leavers = set(rng.sample(range(num_prompts), round(num_prompts * percent / 100)))
    return [_departure(rng, output_len) if index in leavers else None for index in range(num_prompts)]


def _departure(rng: random.Random, output_len: int) -> Departure:
    match rng.choice(list(Moment)):
        case Moment.BEFORE_THE_FIRST:
            return Departure(Moment.BEFORE_THE_FIRST, seconds=rng.uniform(0, PATIENCE))
        case Moment.IN_THE_MIDDLE:
            return Departure(Moment.IN_THE_MIDDLE, texts=rng.randint(1, max(1, output_len - 1)))
        case moment:
            return Departure(moment)


def _single_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Words that stay one token each in any context."""
    words = (tokenizer.decode([id]) for id in range(vocab_size))
    return [word for word in words if _WORD.fullmatch(word) and len(tokenizer.encode(word)) == 1]
