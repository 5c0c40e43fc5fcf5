"""`trioengine bench offline`: requests sent all at once through the engine's public API."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass
from typing import NamedTuple

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.opening import open_engine
from trioengine.cli.bench.report import percentile
from trioengine.cli.progress import progress_bars
from trioengine.core.config import EngineConfig
from trioengine.core.errors import InvalidConfig
from trioengine.core.grammar import Grammar
from trioengine.core.messages import Ready
from trioengine.core.sampling_params import SamplingParams

WARM_UP = (4, 16, 16)  # requests, prompt length, output length, each at most
STRUCTURE = {  # of answers that do not end by themselves: a list of many objects
    "type": "array",
    "minItems": 1_000_000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "title": {"type": "string", "maxLength": 80},
            "price": {"type": "number", "minimum": 0, "maximum": 1000},
            "kind": {"enum": ["book", "film", "song", "play"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["id", "title", "price", "kind", "tags"],
        "additionalProperties": False,
    },
}
UNITS = {  # of the table's figures
    "prompt_len": "tokens",
    "output_len": "tokens",
    "seconds": "s",
    "output_tps": "tokens/s",
    "ttft_median": "s",
    "ttft_p99": "s",
    "tpot_median": "s a token",
    "tpot_p99": "s a token",
    "output_tps_of_runs": "tokens/s",
}


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One run; times in seconds. TTFT: to the first token; TPOT: a token after the first."""

    seconds: float
    output_tps: float
    ttft_median: float
    ttft_p99: float
    tpot_median: float
    tpot_p99: float


class _Timing(NamedTuple):
    num_tokens: int
    ttft: float
    tpot: float


def bench_offline(
    config: EngineConfig,
    requests: int,
    prompt_len: int,
    output_len: int,
    *,
    repeat: int,
    as_json: bool,
    structured: bool = False,
) -> None:
    """Print the run whose throughput is the median of all."""
    grammar = Grammar.json_schema(STRUCTURE) if structured else None
    runs, limits = trio.run(_bench, config, (requests, prompt_len, output_len), repeat, grammar)
    median = sorted(runs, key=lambda run: run.output_tps)[len(runs) // 2]
    figures = {key: round(value, 4) for key, value in asdict(median).items()}
    every = [round(run.output_tps, 1) for run in runs]
    work = {"requests": requests, "prompt_len": prompt_len, "output_len": output_len}
    report = {
        "engine": "trioengine",
        "model": config.model,
        "dtype": limits.dtype,
        "quantization": limits.quantization,
        "kv_cache_dtype": limits.kv_cache_dtype,
        **work,
        **({"structured": True} if structured else {}),
        **figures,
        "output_tps_of_runs": every,
    }
    if as_json:
        print(json.dumps(report))
    else:
        print("\n".join(f"{key:20} {value} {UNITS.get(key, '')}".rstrip() for key, value in report.items()))


async def _bench(
    config: EngineConfig, work: tuple[int, int, int], repeat: int, grammar: Grammar | None
) -> tuple[list[OfflineRun], Ready]:
    with progress_bars() as bars:
        async with open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine:
            check_work(engine, *work)
            await run(engine, *map(min, WARM_UP, work), grammar=grammar)
            return [await run(engine, *work, grammar=grammar) for _ in range(repeat)], engine.limits


def check_work(engine: Engine, requests: int, prompt_len: int, output_len: int) -> None:
    """Raises InvalidConfig if a prompt and its answer would exceed the context."""
    limit = engine.limits.max_model_len
    if prompt_len + output_len > limit:
        raise InvalidConfig(f"--prompt-len {prompt_len} and --output-len {output_len}: the context has {limit} tokens")


async def run(
    engine: Engine, requests: int, prompt_len: int, output_len: int, *, grammar: Grammar | None = None
) -> OfflineRun:
    """Send all requests at once, and measure until all are answered."""
    rng = random.Random(0)
    last = min(49_000, engine.tokenizer.tokenizer.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, grammar=grammar)
    timings: list[_Timing] = []

    async def ask(prompt: list[int]) -> None:
        began = trio.current_time()
        async with engine.open_session(wait=True) as session, session.generate(prompt, params, wait=True) as generation:
            await anext(generation)
            first = trio.current_time() - began
            num_tokens = (await generation.result()).usage.completion_tokens
            rest = trio.current_time() - began - first
            timings.append(_Timing(num_tokens, first, rest / max(1, num_tokens - 1)))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(requests):
            nursery.start_soon(ask, [rng.randrange(min(100, last - 1), last) for _ in range(prompt_len)])
    seconds = trio.current_time() - began
    ttft, tpot = sorted(timing.ttft for timing in timings), sorted(timing.tpot for timing in timings)
    return OfflineRun(
        seconds=seconds,
        output_tps=sum(timing.num_tokens for timing in timings) / seconds,
        ttft_median=statistics.median(ttft),
        ttft_p99=percentile(ttft, 99),
        tpot_median=statistics.median(tpot),
        tpot_p99=percentile(tpot, 99),
    )
