"""Long work is done in a thread, so that nobody else waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trioengine.actors.ports import Ports

T = TypeVar("T")
LONG_JSON = 1 << 16  # bytes of a body, or characters of a message; what is longer is parsed in a thread


async def in_thread_if(is_long: bool, ports: Ports, function: Callable[[], T]) -> T:
    """Call a function that changes nothing; cancelled, its result is thrown away."""
    if not is_long:
        return function()
    result: T = await ports.run_in_thread(function)
    return result
