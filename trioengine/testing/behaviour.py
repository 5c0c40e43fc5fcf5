"""How a simulated worker behaves, and how it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trioengine.core.messages import Fatal


@dataclass(frozen=True)
class Behaviour:
    """How one incarnation behaves; times in seconds."""

    load_time: float = 0.5
    load_bytes: int = 0  # told by LOADING, half of them in half of that time
    step_time: float = 0.01
    decode_time: float = 0.02  # of an image; no longer than a step where there is one
    fatal: Fatal | None = None  # said instead of READY


class Health(enum.Enum):
    """What a simulated worker does with its time."""

    WELL = "well"
    STALLED = "stalled"  # the step in progress never ends; its reader still answers
    HUNG = "hung"  # nothing at all happens, as under SIGSTOP
    DEAD = "dead"
