"""Finds the processes of a server, and their figures, by the id of the first one.

It imports the standard library alone, since it is part of each finding's script. It needs Linux.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def figures_of(pid: int | None) -> tuple[int, int] | None:
    """Return a process's RSS in bytes and its open descriptors, None if they cannot be read."""
    if pid is None:
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None


def children_of(pid: int) -> list[int]:
    """Return the children of a process that live."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return [child for child in found if _lives(child)]


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def worker_of(pid: int | None) -> int | None:
    """Return the child with the most memory, which has the model; None if the process has no children."""
    children = [] if pid is None else children_of(pid)
    return max(children, key=lambda child: figures_of(child) or (0, 0), default=None)
