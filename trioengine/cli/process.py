"""SIGINT and SIGTERM: the first drains, the second aborts, the third kills."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import trio

from trioengine.serve.server import Server

logger = logging.getLogger("trioengine")


async def obey_signals(server: Server, shutdown_timeout: float) -> None:
    """Drain the server (its `run` then returns) at the first signal, and so on; runs until cancelled."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async with trio.open_nursery() as nursery:
            name = signal.Signals(await anext(received)).name
            logger.info(
                "%s: finishing what is in flight, for at most %g s; a second one aborts it", name, shutdown_timeout
            )
            nursery.start_soon(server.drain, shutdown_timeout)
            name = signal.Signals(await anext(received)).name
            logger.info("%s: aborting", name)
            server.abort()
            last = await anext(received)
            signal.signal(last, signal.SIG_DFL)
            os.kill(os.getpid(), last)


HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1; other systems and older kernels refuse it, and nothing changes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \w+ \S+ 0 *(?:\[heap\])?$")


def use_huge_pages() -> int:
    """Move what the process has allocated until now into huge pages, where the kernel does that; bytes moved.

    It takes a millisecond for some megabytes. Only what is nearly full is moved, so the process does not grow by it.
    """
    moved = 0
    with suppress(OSError):  # no /proc
        for start, end in full_mappings(Path("/proc/self/smaps").read_text().splitlines()):
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                moved += HUGE_PAGE if _collapse(page) else 0
    return moved


def full_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Start and end of the private, writable mappings of no file that are in memory by three quarters, of a smaps."""
    mapping: tuple[int, int] | None = None
    for line in smaps:
        if match := _MAPPING.match(line):
            mapping = int(match[1], 16), int(match[2], 16)
        elif mapping is not None and line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
            if resident * 4 >= (mapping[1] - mapping[0]) * 3:
                yield mapping
            mapping = None


def _collapse(page: int) -> bool:
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), _MADV_COLLAPSE) == 0)
