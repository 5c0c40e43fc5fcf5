"""The policy for a chat that outgrows the model's context."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast, get_args

from trioengine.core.arguments import rejected

Overflow: TypeAlias = Literal["refuse", "drop_oldest_turns"]


def check_overflow(overflow: object) -> Overflow:
    """Return the policy of this name. Raises RequestRejected for another one."""
    if overflow not in get_args(Overflow):
        names = " or ".join(map(repr, get_args(Overflow)))
        raise rejected("overflow", f"must be {names}, got {overflow!r:.60}")
    return cast("Overflow", overflow)


def prompt_limit(max_model_len: int, max_tokens: int | None) -> int:
    """Tokens that a prompt may have without losing its oldest turns.

    The rest of the context is room for an answer of `max_tokens`, of half of the context at most, or by default of a
    quarter of it.
    """
    room = max_model_len // 4 if max_tokens is None else min(max_tokens, max_model_len // 2)
    return max_model_len - room


def retained(limit: int, ratio: float) -> int:
    """Tokens to which a prompt over its `limit` is shortened.

    With a ratio below 1 more turns go at once than have to, so that the next ones fit without a cut, and find the
    prompt before them in the prefix cache.
    """
    return int(limit * ratio)
