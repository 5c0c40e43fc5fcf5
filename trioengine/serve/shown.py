"""The optional parts of a response with choices, and the fingerprint of the system that made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from trioengine import __version__
from trioengine.actors.engine import Engine
from trioengine.core.types import Completion, Usage


@dataclass(frozen=True, slots=True)
class Shown:
    """The optional parts of a response that a request asks for."""

    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # in every event of a stream
    token_ids: bool = False  # of the prompt and the answer
    tokens_as_ids: bool = False  # in log-probabilities
    timings: bool = False  # at the end


class Result(NamedTuple):
    """One choice of a whole response."""

    completion: Completion
    prompt_token_ids: tuple[int, ...]  # if asked for


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        **running_usage(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage of a choice so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def timings_json(completions: Iterable[Completion]) -> dict[str, Any]:
    """Return the times of an answer as llama.cpp names them: of several choices, of the one that took longest."""
    completion = max(completions, key=lambda each: each.usage.prefill_time + each.decode_time)
    usage = completion.usage
    num_computed = usage.prompt_tokens - usage.cached_tokens
    num_decoded = max(0, usage.completion_tokens - 1)  # the first token comes with the prompt
    return {
        "cache_n": usage.cached_tokens,
        **_pace("prompt", num_computed, num_computed, usage.prefill_time),
        **_pace("predicted", usage.completion_tokens, num_decoded, completion.decode_time),
    }


def _pace(name: str, count: int, num_timed: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / num_timed if num_timed else 0.0,
        f"{name}_per_second": num_timed / seconds if seconds else 0.0,
    }


def fingerprint(engine: Engine, model: str) -> str:
    """Return a hash of the model, its weights, and the code that computes it."""
    ready, weights = engine.limits, engine.weights
    code = ready.dtype, ready.device, ready.kernels, ready.quantization, ready.kv_cache_dtype
    return _fingerprint(model, str(weights.path).rpartition("/")[2], weights.version, *code)


@lru_cache(maxsize=16)
def _fingerprint(*parts: object) -> str:
    return "fp_" + blake2b(repr((__version__, *parts)).encode(), digest_size=6).hexdigest()
