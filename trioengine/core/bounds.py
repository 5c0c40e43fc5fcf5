"""What a value may be: each check gives the rule that the value breaks, or None."""

from __future__ import annotations

MAX_COUNT = 2**31 - 1  # of tokens, sequences, …: what an int32 holds
MAX_INT64 = 2**63 - 1  # what msgpack and torch hold
_SHOWN = 80  # characters


def integer_problem(value: object, low: int, high: int) -> str | None:
    """The bounds are allowed; a bool is no integer."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return None
    return f"must be an integer from {low} to {high}, got {brief(value)}"


def number_problem(value: object, low: float, high: float, *, above: bool = False) -> str | None:
    """The bounds are allowed, or only the upper one where it must be `above`; nan and infinity are out."""
    within = isinstance(value, (int, float)) and low <= value <= high
    if within and not isinstance(value, bool) and not (above and value == low):
        return None
    rule = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    return f"must be a number {rule}, got {brief(value)}"


def brief(value: object) -> str:
    """The value for a message, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a value too long to show"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
