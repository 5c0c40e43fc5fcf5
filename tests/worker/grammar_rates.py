"""Compare the rates of answers without a grammar, with one whose forced tokens are sampled, and with one as it is.

Usage: python tests/worker/grammar_rates.py [THREADS [MODEL]], with the root and tests in PYTHONPATH. The worker's core
runs in this process, so that a round runs all three in turn and gives ratios. Prints, for each number of streams, the
medians of the rates, of the rounds' ratios, with their ranges, of the wall clock and of CPU time, the share of the
answers' tokens that were forced, and the median milliseconds of a step and of its masks.
"""

import random
import statistics
import sys
import time
from typing import NamedTuple
from unittest.mock import patch

from trioengine.cli.bench.offline import STRUCTURE
from trioengine.core.config import WorkerConfig
from trioengine.core.grammar import Grammar
from trioengine.core.messages import AddMessage, AddSession
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.hub.model_info import read_model
from trioengine.hub.pull import resolve
from trioengine.text.grammar import Compiler, Matcher
from trioengine.worker.__main__ import load
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.grammars import compile_for
from trioengine.worker.scheduling.sequence import Limits, Sequence

STREAMS = (16, 1)
ROUNDS = 7
PROMPT, OUTPUT = 16, 64  # tokens
WAYS = ("plain", "sampled", "forced")


class Run(NamedTuple):
    """Seconds of the wall clock for each step, and for its masks; CPU seconds of all; the share of forced tokens."""

    steps: list[float]
    masks: list[float]
    cpu: float
    forced: float

    @property
    def seconds(self) -> float:
        return sum(self.steps)


class Rates:
    """A model, and runs of its answers."""

    def __init__(self, threads: int, model: str) -> None:
        path = resolve(model)
        self._model = read_model(path)
        self._compiler = Compiler(self._model.tokenizer, self._model.eos_token_ids)
        info, self._runner = load(
            WorkerConfig(str(path), max_model_len=2048, num_threads=threads), lambda done, total: None
        )
        self._limits = Limits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            kv_blocks_total=info.kv_blocks_total,
            block_size=info.block_size,
            chunked_prefill_size=512,
            enable_prefix_caching=False,
        )
        self._submitted: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        self._submitted.append(sequence)

    def run(self, way: str, streams: int) -> Run:
        core = EngineCore(self._runner, self._limits, time.perf_counter, compiler=self)
        grammar = None if way == "plain" else Grammar.json_schema(STRUCTURE)
        params = ResolvedParams(temperature=0, max_tokens=OUTPUT, seed=1, ignore_eos=True, grammar=grammar)
        rng = random.Random(0)
        for number in range(streams):
            prompt = token_ids([rng.randrange(100, 49_000) for _ in range(PROMPT)])
            core.handle(AddSession(number))
            core.handle(AddMessage(number, number, 0, prompt, params, ()))
        for sequence in self._submitted:
            core.handle(compile_for(sequence, self._compiler.compile))
        self._submitted.clear()
        steps, masks, spent, sampled = [], [], 0.0, 0
        allowed, cpu = Matcher.allowed, time.process_time()

        def timed(matcher: Matcher) -> bytes:
            nonlocal spent
            began = time.perf_counter()
            try:
                return allowed(matcher)
            finally:
                spent += time.perf_counter() - began

        with patch.object(Matcher, "allowed", timed):
            while core.has_work:
                spent, began = 0.0, time.perf_counter()
                sampled += len(core.step()[0].rows)
                steps.append(time.perf_counter() - began)
                masks.append(spent)
        return Run(steps, masks, time.process_time() - cpu, 1 - sampled / (streams * OUTPUT))


def measure(rates: Rates, way: str, streams: int) -> Run:
    if way == "forced":
        return rates.run(way, streams)
    with patch.object(Sequence, "forced_token", lambda sequence: None):
        return rates.run(way, streams)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main(threads: str = "2", model: str = "smollm2-135m-instruct") -> None:
    rates = Rates(int(threads), model)
    for way in WAYS:
        measure(rates, way, 4)
    for streams in STREAMS:
        rounds = []
        for number in range(ROUNDS):
            ways = WAYS if number % 2 == 0 else WAYS[::-1]
            rounds.append({way: measure(rates, way, streams) for way in ways})
        print(f"{streams} streams, {ROUNDS} rounds")
        for way in WAYS:
            runs = [each[way] for each in rounds]
            tps = streams * OUTPUT / statistics.median(run.seconds for run in runs)
            step, mask = (1000 * statistics.median([t for run in runs for t in run[part]]) for part in (0, 1))
            clock, cpu = ratios(rounds, "plain", way)
            print(
                f"{way:8}{tps:6.1f} tokens/s; of plain {clock}, by CPU time {cpu}; {runs[0].forced:.0%} forced; "
                f"step {step:.2f} ms, masks {mask:.3f} ms"
            )
        print("forced to sampled {}, by CPU time {}".format(*ratios(rounds, "sampled", "forced")))


def ratios(rounds: list[dict[str, Run]], one: str, other: str) -> tuple[str, str]:
    """The rate of the other over that of the one, by the wall clock and by CPU time."""
    clock = [each[one].seconds / each[other].seconds for each in rounds]
    return spread(clock), spread([each[one].cpu / each[other].cpu for each in rounds])


if __name__ == "__main__":
    main(*sys.argv[1:])
