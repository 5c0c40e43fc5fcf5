"""When a request's time is over."""

from __future__ import annotations

import math

import trio

from trioengine.core.errors import RequestRejected


def deadline_after(timeout: float | None) -> float:
    """The moment `timeout` seconds from now, on trio's clock; None: never. Raises RequestRejected for a bad number."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        message = f"timeout must be positive seconds, got {timeout!r}"
        raise RequestRejected("invalid_value", message, param="timeout")
    return trio.current_time() + timeout
