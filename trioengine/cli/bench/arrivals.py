"""When requests begin."""

from __future__ import annotations

import math
import random


def arrivals(rng: random.Random, num_prompts: int, rate: float, burstiness: float) -> list[float]:
    """Seconds from the beginning, ascending; all 0 where the rate is infinite.

    The gaps are gamma distributed with the shape `burstiness`: with 1, a Poisson process. As in vLLM they are scaled so
    that the last request begins after `num_prompts / rate`, whatever the seed.
    """
    if rate == math.inf:
        return [0.0] * num_prompts
    at, times = 0.0, []
    for _ in range(num_prompts):
        at += rng.gammavariate(burstiness, 1.0)
        times.append(at)
    scale = num_prompts / rate / at if at else 0.0
    return [time * scale for time in times]
