"""What one look at the machine has found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Severity(enum.Enum):
    """What a problem means for `trioengine serve` with the default model."""

    FATAL = "error"  # it cannot work
    WARNING = "warning"  # it works, but not as it might


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and what to do about it."""

    severity: Severity
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Part:
    """Facts by their names; sizes in bytes have names that end in `_bytes`. JSON types only."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def fatal(message: str, remedy: str) -> Problem:
    """It cannot work."""
    return Problem(Severity.FATAL, message, remedy)


def warning(message: str, remedy: str) -> Problem:
    """It could be better."""
    return Problem(Severity.WARNING, message, remedy)
