"""How rotary positions are scaled for long contexts: from a config.json or a GGUF file's metadata."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from trioengine.core.checks import MAX_COUNT
from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub.model_config import Fields


class RopeType(enum.Enum):
    """The kinds of scaling, with the names of config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


_DYNAMIC = "dynamic"  # scales contexts beyond max_position_embeddings, which are refused
_ORIGINAL = "original_max_position_embeddings"
_LEAST_DIVISOR = 1e-6  # of a frequency
_ALIASES = {"su": "longrope"}  # names that old files have


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaling, with the names of config.json; `kind` decides which of the numbers are used."""

    kind: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # of cosines and sines, in yarn and longrope; None: from the factor
    short_factor: tuple[float, ...] = ()  # longrope: divisors of the frequencies, up to the original context
    long_factor: tuple[float, ...] = ()  # and beyond it

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """Divide all frequencies by the factor."""
        return cls() if factor == 1 else cls(kind=RopeType.LINEAR, factor=factor)

    def max_positions(self, given: int) -> int:
        """The context in tokens: yarn extends the original one, whether or not config.json names the longer one."""
        if self.kind is not RopeType.YARN:
            return given
        return max(given, int(min(self.original_max_position_embeddings * self.factor, MAX_COUNT)))


def scaling_from_hf(rope: Fields, fields: Fields, max_positions: int, rotary_dim: int) -> RopeScaling:
    """Read the object `rope` of config.json, whose other fields are `fields`. Raises ModelError, naming the field."""
    kind = rope.get("type") if rope.get("rope_type") is None else rope.get("rope_type")
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if (kind is None and rope.get("factor") is None) or kind == _DYNAMIC:
        return RopeScaling()
    supported = {member.value: member for member in RopeType}
    if not isinstance(kind, str) or kind not in supported:
        names = ", ".join((*supported, _DYNAMIC))
        raise ModelError(f"{rope.path}: rope scaling {brief(kind)} is not supported; supported: {names}")
    place = rope if fields.get(_ORIGINAL) is None else fields
    context = place.count(_ORIGINAL, max_positions)
    if context < 2 and supported[kind] in (RopeType.YARN, RopeType.LONGROPE):  # its logarithm divides
        raise place.bad(_ORIGINAL, "must be at least 2", context)
    match supported[kind]:
        case RopeType.DEFAULT:
            return RopeScaling()
        case RopeType.LINEAR:
            return RopeScaling.linear(rope.number("factor"))
        case RopeType.LLAMA3:
            return _llama3(rope, context)
        case RopeType.YARN:
            return _yarn(rope, context, max_positions)
        case RopeType.LONGROPE:
            return RopeScaling(
                kind=RopeType.LONGROPE,
                factor=rope.number("factor", max_positions / context),
                original_max_position_embeddings=context,
                attention_factor=_optional_number(rope, "attention_factor"),
                short_factor=_divisors(rope, "short_factor", rotary_dim // 2),
                long_factor=_divisors(rope, "long_factor", rotary_dim // 2),
            )


def _llama3(rope: Fields, context: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.bad("high_freq_factor", f"must be above low_freq_factor, {low}")
    return RopeScaling(
        kind=RopeType.LLAMA3,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=context,
    )


def _yarn(rope: Fields, context: int, max_positions: int) -> RopeScaling:
    factor = rope.number("factor", max_positions / context)
    attention_factor = _optional_number(rope, "attention_factor")
    mscale, mscale_all_dim = _optional_number(rope, "mscale"), _optional_number(rope, "mscale_all_dim")
    if attention_factor is None and mscale is not None and mscale_all_dim is not None:
        attention_factor = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    return RopeScaling(
        kind=RopeType.YARN,
        factor=factor,
        original_max_position_embeddings=context,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention_factor,
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor of cosines and sines (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _divisors(rope: Fields, field: str, count: int) -> tuple[float, ...]:
    if rope.get(field) is None:
        raise rope.bad(field, f"must be {count} numbers")
    return rope.numbers(field, count, 1.0, _LEAST_DIVISOR)


def _optional_number(rope: Fields, field: str) -> float | None:
    return None if rope.get(field) is None else rope.number(field)


def scaling_from_gguf(fields: Fields, max_positions: int) -> RopeScaling:
    """Read as llama.cpp does: linear by default, from the old key if the new one is absent; 0 means no scaling."""
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "", "none", "linear", "yarn"):
        named = f"rope scaling {brief(kind)}"
        raise ModelError(f"{fields.path}: {named} is not supported in GGUF files; supported: none, linear, yarn")
    if kind in ("none", ""):
        return RopeScaling()
    key = "rope.scale_linear" if fields.get("rope.scaling.factor") is None else "rope.scaling.factor"
    if _is_zero(fields.get(key)):
        return RopeScaling()
    factor = fields.number(key, 1.0)
    if kind != "yarn":
        return RopeScaling.linear(factor)
    context = fields.count("rope.scaling.original_context_length", max_positions)
    if context < 2:
        raise fields.bad("rope.scaling.original_context_length", "must be at least 2", context)
    more = _optional_number(fields, "rope.scaling.attn_factor")
    attention_factor = None if more is None else more * yarn_attention_factor(factor)
    return RopeScaling(RopeType.YARN, factor, context, attention_factor=attention_factor)


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0
