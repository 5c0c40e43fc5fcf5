"""The server's process: signals, its limit of file descriptors, and its memory once the engine is ready."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import trio

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineError
from trioengine.serve.server import Server

logger = logging.getLogger("trioengine")
COLLECT_AFTER = (10_000, 20, 20)  # thresholds of the garbage collector: objects, and collections of younger ones
HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1; other systems and older kernels refuse it, and nothing changes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \w+ \S+ 0 *(?:\[heap\])?$")


async def obey_signals(server: Server, shutdown_timeout: float) -> None:
    """Drain the server at the first SIGINT or SIGTERM, abort at the second, die of the third; runs until cancelled."""
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


def raise_fd_limit() -> None:
    """Raise the limit of file descriptors as far as an unprivileged process may (`ulimit -n` to `ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a kernel may refuse even that; then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def freeze_gc_when_ready(engine: Engine) -> None:
    """Exempt the objects of the loaded engine from garbage collection, and move their memory into huge pages.

    Collections become rarer as well: streams make many objects and few cycles, and by default the collector would
    visit all young objects after every 700 of them.
    """
    with suppress(EngineError):  # an engine that cannot run ends the server, which reports the error
        await engine.ready()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        use_huge_pages()


def use_huge_pages() -> int:
    """Move the memory allocated until now into huge pages where the kernel can; returns the bytes moved.

    Between two steps of a worker the processor's TLB loses the small pages. It takes a millisecond for some megabytes.
    Only mappings that are nearly full are moved, so the process does not grow by it.
    """
    moved = 0
    with suppress(OSError):  # no /proc
        for start, end in full_mappings(Path("/proc/self/smaps").read_text().splitlines()):
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                moved += HUGE_PAGE if _collapse(page) else 0
    return moved


def full_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of the private, writable, anonymous mappings that are resident by three quarters."""
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
