"""How the next token is chosen, and when an answer stops: the names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trioengine.core.bounds import MAX_COUNT, MAX_INT64, brief, integer_problem, number_problem
from trioengine.core.errors import RequestRejected

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything about one request but its prompt; validated when made.

    Raises RequestRejected(code="invalid_value", param=<field>) for a value out of its range.
    """

    max_tokens: int | None = None  # None: up to the context
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative; 1: none
    presence_penalty: float = 0.0  # over the output, additive
    frequency_penalty: float = 0.0  # over the output, additive, times the count
    seed: int | None = None  # None: minted by the engine; with a seed, float32 answers are repeatable
    stop: tuple[str, ...] = ()  # not part of the text; a string or a sequence of strings
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # no stop token before that many
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many top alternatives to report beside the chosen token; None: none at all
    skip_special_tokens: bool = True  # in the text, not in the token ids

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._validate_numbers()
        self._validate_stops()
        self._validate_logit_bias()

    def _validate_numbers(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, MAX_COUNT, optional=True)
        _number("temperature", self.temperature, 0, 100)
        _integer("top_k", self.top_k, -1, MAX_COUNT)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _integer("seed", self.seed, -MAX_INT64 - 1, MAX_INT64, optional=True)
        _integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, f"must be true or false, got {brief(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    def _validate_stops(self) -> None:
        if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOP_STRINGS:
            raise _invalid("stop", f"must be a string or at most {MAX_STOP_STRINGS} strings, got {brief(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise _invalid("stop", f"must hold strings of 1 to {MAX_STOP_LENGTH} characters, got {brief(text)}")
        if not isinstance(self.stop_token_ids, tuple) or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            shown = brief(self.stop_token_ids)
            raise _invalid("stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} token ids, got {shown}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, MAX_COUNT)

    def _validate_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            shown = brief(self.logit_bias)
            raise _invalid("logit_bias", f"must map at most {MAX_LOGIT_BIAS} token ids to numbers, got {shown}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, MAX_COUNT)
            _number("logit_bias", bias, -100, 100)


def _invalid(name: str, problem: str) -> RequestRejected:
    return RequestRejected("invalid_value", f"{name} {problem}", param=name)


def _integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if not (optional and value is None) and (problem := integer_problem(value, low, high)) is not None:
        raise _invalid(name, problem)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if (problem := number_problem(value, low, high, above=above)) is not None:
        raise _invalid(name, problem)
