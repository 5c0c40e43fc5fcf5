"""Clients that leave before their answer is complete: which, and when."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

PATIENCE = 1.0  # seconds that a client which leaves before the first token waits for it, at most


class Moment(enum.Enum):
    """When a client leaves."""

    AT_ONCE = enum.auto()  # its request is sent: where the server is busy, it is queued
    BEFORE_THE_FIRST = enum.auto()  # after some time, or at the first piece of text if that comes earlier
    IN_THE_MIDDLE = enum.auto()  # after some pieces of text


@dataclass(frozen=True, slots=True)
class Departure:
    """A client leaves at `moment`; at the latest when it has that many pieces of text."""

    moment: Moment
    seconds: float = 0.0
    texts: int = 1


def departures(rng: random.Random, num_prompts: int, percent: float, output_len: int) -> list[Departure | None]:
    """For each request, when its client leaves; None: it stays. Exactly that share leaves, rounded."""
    leavers = set(rng.sample(range(num_prompts), round(num_prompts * percent / 100)))
    return [_departure(rng, output_len) if index in leavers else None for index in range(num_prompts)]


def _departure(rng: random.Random, output_len: int) -> Departure:
    match rng.choice(list(Moment)):
        case Moment.BEFORE_THE_FIRST:
            return Departure(Moment.BEFORE_THE_FIRST, seconds=rng.uniform(0, PATIENCE))
        case Moment.IN_THE_MIDDLE:
            return Departure(Moment.IN_THE_MIDDLE, texts=rng.randint(1, max(1, output_len - 1)))
        case moment:
            return Departure(moment)
