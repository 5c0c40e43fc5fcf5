"""Limits of grammars that are checked before they are compiled.

The compiler has limits of its own, but it recurses once for each nested part: deep enough ones overflow its stack,
which ends the process. With a stack of 8 MiB that takes 1,700 levels of a schema, or 1,900 parts of a Lark grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from trioengine.core.errors import RequestRejected

MAX_SIZE = 1 << 16  # characters
MAX_DEPTH = 64  # of a schema
MAX_REFERENCE_DEPTH = 1000  # levels of a schema, if each reference led to the next one
MAX_MULTIPLE = 10_000  # the sum of all multipleOf, without decimal points: the compiler makes as many states
MAX_LARK_PARTS = 500  # definitions and groups
_HUGE = 1e20


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestRejected for a schema beyond the limits. Iterative, because it guards against recursion."""
    references: dict[str, int] = {}  # and the deepest level of each
    multiples = bases = 0
    level: list[Any] = [schema]
    for depth in range(MAX_DEPTH):
        for parent in level:
            if isinstance(parent, Mapping):
                if isinstance(reference := parent.get("$ref"), str):
                    references[reference] = depth + 1
                multiples += _whole_number(parent.get("multipleOf"))
                bases += depth > 0 and any(isinstance(parent.get(name), str) for name in ("$id", "id"))
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(child, Mapping | list | tuple)
        ]
    if level:
        raise invalid(f"the schema is nested deeper than {MAX_DEPTH} levels")
    reached = sum(references.values()) * (1 + bases)  # a reference means another place for each base
    if reached > MAX_REFERENCE_DEPTH:
        raise invalid(
            f"the schema's {len(references)} references ($ref) can lead {reached} levels deep; at most "
            f"{MAX_REFERENCE_DEPTH} are accepted"
        )
    if multiples > MAX_MULTIPLE:
        raise invalid(
            f"the values of multipleOf are {multiples} together, without decimal points; at most "
            f"{MAX_MULTIPLE} is accepted"
        )


def _whole_number(value: Any) -> int:
    """Return a multipleOf without its decimal point: 1 for powers of ten, which cost nothing; 0 if it is no number."""
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
