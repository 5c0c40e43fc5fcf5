"""How many descriptors the process may have, and how many connections that leaves."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

logger = logging.getLogger("trioengine")
RESERVE = 64  # for the worker, files, listeners, and clients that are turned away


def raise_limit() -> None:
    """Take as many descriptors as the process may without asking anyone (`ulimit -n` to `ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a kernel may refuse even that; then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(max_connections: int) -> int:
    """As many connections, or fewer, so that the worker can still be started again; at least one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or max_connections <= soft - RESERVE:
        return max_connections
    limit = max(1, soft - RESERVE)
    logger.warning("at most %d connections: the process may have %d descriptors (ulimit -n)", limit, soft)
    return limit
