"""The parameters of one request: sampling, and the policy for a prompt that outgrows the context.

Names and meanings of the sampling parameters are vLLM's.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, cast, get_args

from trioengine.core.checks import (
    MAX_COUNT,
    MAX_INT64,
    checked_call,
    field_names,
    fields_checked,
    integer,
    number,
    parameters_of,
    rejected,
)
from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.wording import brief, changed_fields

Overflow: TypeAlias = Literal["refuse", "drop_oldest_turns"]  # policy for a chat that outgrows the model's context

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CACHE_SALT = 256  # characters
MAX_SPECULATIVE_TOKENS = 15  # in one step
NUMBERS: Mapping[str, tuple[Callable[..., float], float, float]] = {  # the check and the bounds of each
    "max_tokens": (integer, 0, MAX_COUNT),
    "top_k": (integer, -1, MAX_COUNT),
    "seed": (integer, -MAX_INT64 - 1, MAX_INT64),
    "min_tokens": (integer, 0, MAX_COUNT),
    "logprobs": (integer, 0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (integer, 0, MAX_TOP_LOGPROBS),
    "num_speculative_tokens": (integer, 0, MAX_SPECULATIVE_TOKENS),
    "temperature": (number, 0, 100),
    "top_p": (number, 0, 1),
    "min_p": (number, 0, 1),
    "repetition_penalty": (number, 0.01, 100),
    "presence_penalty": (number, -2, 2),
    "frequency_penalty": (number, -2, 2),
}
_DEFAULT_NUMBERS = {**NUMBERS, "max_tokens": (integer, 1, MAX_COUNT)}  # no default lets a prompt be scored only
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # None: the model's default
_DEFAULTED = (*_MODEL_DEFAULTS, "num_speculative_tokens")  # the last one: the engine's default
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", *_DEFAULTED)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REQUEST_KEYWORDS = ("keep_partial", "timeout", "wait", "label")  # of `generate`, beside the sampling parameters
P = ParamSpec("P")
Params = TypeVar("Params", bound="SamplingParams")
R = TypeVar("R")
T = TypeVar("T")
_set = object.__setattr__  # for fields of frozen instances that are being made


@fields_checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one request. Lists become tuples, and numbers of other libraries int and float.

    None is a value that was not given: the model's default, or without one the value that changes nothing.

    Raises RequestRejected(code="invalid_value", param=<field>) for a value outside its range.
    """

    # None: the model's default, else up to the context; 0, with prompt_logprobs only: the prompt is scored;
    # 0 without them is for EMBEDDING
    max_tokens: int | None = None
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 or -1: all tokens
    top_p: float | None = None  # 0: the best token alone
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output, multiplicative; 1: none
    presence_penalty: float = 0.0  # over the output, additive
    frequency_penalty: float = 0.0  # over the output, additive, times the count
    seed: int | None = None  # None: minted by the engine; with a seed, answers are as reproducible as greedy ones
    stop: tuple[str, ...] = ()  # left out of the text; a string or a sequence of strings
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # stop tokens and stop strings do not end a shorter answer
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # number of top alternatives to report beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for each token of the prompt, which the prefix cache does not shorten
    skip_special_tokens: bool = True  # in the text, not in the token ids
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    grammar: Grammar | None = None  # which the answer follows; where it is complete, the answer ends
    # tokens drafted a step, at most, where the text repeats itself or by a draft model; None: the engine's
    num_speculative_tokens: int | None = None

    def __repr__(self) -> str:
        return changed_fields(self)

    @property
    def embeds(self) -> bool:
        """Whether the prompt is embedded: it is neither answered nor scored."""
        return self.max_tokens == 0 and self.prompt_logprobs is None

    def __post_init__(self) -> None:
        for name, (check, low, high) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _set(self, name, _checked(name, check, value, low, high))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise rejected("max_tokens", "must be at least 1 without prompt_logprobs, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise rejected("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise rejected(name, f"must be true or false, got {brief(getattr(self, name))}")
        salt = self.cache_salt
        if not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT or _LONE_SURROGATE.search(salt):
            rule = f"must be Unicode text of at most {MAX_CACHE_SALT} characters"
            raise rejected("cache_salt", f"{rule}, got {brief(salt)}")
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise rejected("grammar", f"must be a Grammar, got {brief(self.grammar)}")
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, tuple | list) or len(stops) > MAX_STOP_STRINGS:
            raise rejected("stop", f"must be a string or at most {MAX_STOP_STRINGS} strings, got {brief(stops)}")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise rejected("stop", f"must hold strings of 1 to {MAX_STOP_LENGTH} characters, got {brief(text)}")
        _set(self, "stop", tuple(stops))
        ids = self.stop_token_ids
        if not isinstance(ids, tuple | list) or len(ids) > MAX_STOP_TOKEN_IDS:
            rule = f"must hold at most {MAX_STOP_TOKEN_IDS} token ids"
            raise rejected("stop_token_ids", f"{rule}, got {brief(ids)}")
        _set(self, "stop_token_ids", tuple([_token_id("stop_token_ids", token_id) for token_id in ids]))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            shown = brief(self.logit_bias)
            raise rejected("logit_bias", f"must map at most {MAX_LOGIT_BIAS} token ids to numbers, got {shown}")
        biases = {
            _token_id("logit_bias", token_id): _checked("logit_bias", number, bias, -100, 100, item=": bias")
            for token_id, bias in self.logit_bias.items()
        }
        _set(self, "logit_bias", biases)


@fields_checked
@dataclass(frozen=True, slots=True)
class ResolvedParams(SamplingParams):
    """Parameters in which every default is resolved, as the worker gets them."""

    __repr__ = SamplingParams.__repr__

    max_tokens: int = MAX_COUNT
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    num_speculative_tokens: int = 0


_FIELDS = field_names(SamplingParams)
_NEUTRAL = {each.name: each.default for each in dataclasses.fields(ResolvedParams) if each.name in _DEFAULTED}


def params_of_valid(*values: object) -> ResolvedParams:
    """Make parameters from the values of all fields, which are known to be valid, without validation."""
    params = object.__new__(ResolvedParams)
    for name, value in zip(_FIELDS, values, strict=True):
        _set(params, name, value)
    return params


def resolved_params(params: SamplingParams, defaults: Mapping[str, float], **changes: object) -> ResolvedParams:
    """Return the parameters with the model's `defaults` for the values that were not given.

    The `changes` are further values; all are known to be valid, and max_tokens and seed are among them or given.
    """
    values = {name: getattr(params, name) for name in _FIELDS} | changes
    for name, neutral in _NEUTRAL.items():
        if values[name] is None:
            values[name] = defaults.get(name, neutral)
    return params_of_valid(*values.values())


def checked_defaults(given: Mapping[str, object]) -> Mapping[str, float]:
    """Return the defaults of a model by the names of parameters. Raises RequestRejected for a bad value."""
    bounds = {name: _DEFAULT_NUMBERS[name] for name in given}
    return {name: _checked(name, check, given[name], low, high) for name, (check, low, high) in bounds.items()}


def replace_valid(params: Params, **changes: object) -> Params:
    """Return a copy with these fields, which are known to be valid, without validation."""
    replaced = copy(params)
    for name, value in changes.items():
        _set(replaced, name, value)
    return replaced


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of the calls that run a request."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    min_tokens: int
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    cache_salt: str
    grammar: Grammar | None
    num_speculative_tokens: int | None


def merged_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Return `params`, or the defaults, with these fields replaced. Raises RequestRejected for a bad value."""
    if params is None:
        return SamplingParams(**options)
    if not isinstance(params, SamplingParams):
        raise rejected("params", f"must be SamplingParams, got {type(params).__name__}")
    return dataclasses.replace(params, **options) if options else params


def sampling_checked(function: Callable[P, R], name: str | None = None) -> Callable[P, R]:
    """Return the function under this name; it raises UnknownArgument for a keyword that neither it nor sampling has."""
    known = [*parameters_of(function), *field_names(SamplingParams)]
    function = inspect.unwrap(function)  # a second name for a checked function does not check twice
    return checked_call(function, name or function.__name__, known, _REQUEST_KEYWORDS)


def check_overflow(overflow: object) -> Overflow:
    """Return the policy of this name. Raises RequestRejected for an unknown one."""
    if overflow not in get_args(Overflow):
        names = " or ".join(map(repr, get_args(Overflow)))
        raise rejected("overflow", f"must be {names}, got {overflow!r:.60}")
    return cast("Overflow", overflow)


def check_retention_ratio(ratio: object) -> float:
    """Return the part of the limit to which a chat over it is shortened. Raises RequestRejected outside of 0 to 1."""
    return _checked("retention_ratio", number, ratio, 0, 1)


def prompt_limit(max_model_len: int, max_tokens: int | None) -> int:
    """Return how many tokens a prompt may have before its oldest turns are dropped.

    The rest of the context is room for an answer: `max_tokens`, at most half of the context; by default a quarter.
    """
    room = max_model_len // 4 if max_tokens is None else min(max_tokens, max_model_len // 2)
    return max_model_len - room


def check_room(num_tokens: int, max_model_len: int, max_tokens: int | None, name: str = "prompt") -> None:
    """Raise RequestRejected for a prompt of so many tokens that it leaves no room for an answer.

    A prompt that is only scored, with `max_tokens` 0, may fill the context. `name` is the prompt's path.
    """
    if num_tokens < max_model_len or (max_tokens == 0 and num_tokens == max_model_len):
        return
    problem = "are too many for" if max_tokens == 0 else "leave no room for an answer in"
    message = f"{name}: {num_tokens} tokens {problem} a context of {max_model_len}"
    raise RequestRejected("context_length_exceeded", message, param=name)


def retained(limit: int, ratio: float) -> int:
    """Return to how many tokens a prompt over its `limit` is shortened.

    With a ratio below 1 more turns are dropped at once than necessary, so that the next prompts fit uncut, and find
    their beginning in the prefix cache.
    """
    return int(limit * ratio)


def _checked(name: str, check: Callable[..., T], value: object, low: float, high: float, *, item: str = "") -> T:
    try:
        return check(value, low, high)
    except ValueError as exc:
        raise RequestRejected("invalid_value", f"{name}{item} {exc}", param=name) from None


def _token_id(name: str, value: object) -> int:
    return _checked(name, integer, value, 0, MAX_COUNT, item=": token id")


EMBEDDING = replace_valid(SamplingParams(), max_tokens=0)  # the parameters of an embedding model's requests
