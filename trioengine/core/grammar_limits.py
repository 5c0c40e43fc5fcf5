"""Limits of grammars that are checked before they are compiled.

The compiler has limits of its own, but it recurses once for each nested part: deep enough ones overflow its stack,
which ends the process. With a stack of 8 MiB that takes 1,700 levels of a schema, or 1,900 parts of a Lark grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from decimal import Decimal
from typing import Any

from trioengine.core.errors import RequestRejected

MAX_SIZE = 1 << 16  # characters
MAX_DEPTH = 64  # of a schema
MAX_REFERENCE_DEPTH = 1000  # levels of a schema, if each reference led to the next one
MAX_MULTIPLE = 10_000  # the sum of all multipleOf, without decimal points: the compiler makes as many states
MAX_LARK_PARTS = 500  # definitions and groups
_HUGE = 1e20
_MINIMA = frozenset({"minimum", "exclusiveMinimum"})
_MAXIMA = frozenset({"maximum", "exclusiveMaximum"})
_EXCLUDING = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_COMBINING = frozenset({"anyOf", "oneOf", "$ref"})


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestRejected for a schema beyond the limits, or with bounds that the compiler takes wrongly."""
    levels = _levels(schema)
    references: dict[str, int] = {}  # and the deepest level of each
    for depth, level in enumerate(levels, 1):
        references |= {part["$ref"]: depth for part in level if isinstance(part.get("$ref"), str)}
    bases = sum(isinstance(part.get(name), str) for level in levels[1:] for part in level for name in ("$id", "id"))
    reached = sum(references.values()) * (1 + bases)  # a reference means another place for each base
    if reached > MAX_REFERENCE_DEPTH:
        raise invalid(
            f"the schema's {len(references)} references ($ref) can lead {reached} levels deep; at most "
            f"{MAX_REFERENCE_DEPTH} are accepted"
        )
    parts = [part for level in levels for part in level]
    multiples = sum(_whole_number(part.get("multipleOf")) for part in parts)
    if multiples > MAX_MULTIPLE:
        raise invalid(
            f"the values of multipleOf are {multiples} together, without decimal points; at most "
            f"{MAX_MULTIPLE} is accepted"
        )
    _check_bounds(parts)


def _levels(schema: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the objects of a schema by their depth. Iterative, because it guards against recursion."""
    levels = []
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        levels.append([part for part in level if isinstance(part, Mapping)])
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(child, Mapping | list | tuple)
        ]
        if len(level) > MAX_SIZE // 2:  # each takes two characters
            raise invalid(f"the schema has more than {MAX_SIZE} characters")
    if level:
        raise invalid(f"the schema is nested deeper than {MAX_DEPTH} levels")
    return levels


def _check_bounds(parts: list[Mapping[str, Any]]) -> None:
    """Refuse an excluded whole number whose other bound is less than 1 away, which llguidance 1.9 would allow.

    It does so for 0 < x <= 0.5 and for -2.5 <= x < -2. Bounds of several parts count together where parts are combined.
    """
    groups = [[part] for part in parts if not _EXCLUDING.isdisjoint(part)]
    if groups and any("allOf" in part or _bounds_a_combination(part) for part in parts):
        groups = [parts]
    for group in groups:
        for excluded, sign, others in (("exclusiveMinimum", 1, _MAXIMA), ("exclusiveMaximum", -1, _MINIMA)):
            ends = {sign * value for value in _numbers(group, {excluded}) if value % 1 == 0 and sign * value >= 0}
            near = sorted(sign * value for value in _numbers(group, others))
            for end in ends:
                if any(end < value < end + 1 for value in near):
                    raise invalid(
                        f"{excluded} cannot be enforced for {sign * end:g} with the other bound less than 1 away; "
                        "multiply the values by a power of ten"
                    )


def _bounds_a_combination(part: Mapping[str, Any]) -> bool:
    return not _COMBINING.isdisjoint(part) and not (_MINIMA | _MAXIMA).isdisjoint(part)


def _numbers(parts: list[Mapping[str, Any]], names: Set[str]) -> list[int | float]:
    values = [part.get(name) for part in parts for name in names]
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _whole_number(value: Any) -> int:
    """Return a multipleOf without its decimal point: 1 for powers of ten, which cost nothing; 0 for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _HUGE:
        return 0  # the compiler refuses it
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return 1 if digits == (1,) else int("".join(map(str, digits))) * 10 ** max(0, int(exponent))


def check_lark(grammar: str) -> None:
    """Raise RequestRejected for a grammar beyond the limits."""
    if "%json" in grammar:
        raise invalid("a grammar cannot hold a schema (%json); give the schema in place of a grammar")
    parts = sum(map(grammar.count, ":([{"))
    if parts > MAX_LARK_PARTS:
        raise invalid(f"the grammar has {parts} definitions and groups; at most {MAX_LARK_PARTS} are accepted")


def check_size(source: str) -> None:
    """Raise RequestRejected for a source that is too long."""
    if len(source) > MAX_SIZE:
        raise invalid(f"the grammar has {len(source)} characters; at most {MAX_SIZE} are accepted")


def invalid(message: str) -> RequestRejected:
    """Make the error of a grammar."""
    return RequestRejected("invalid_grammar", message, param="grammar")
