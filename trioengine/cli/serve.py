"""`trioengine serve`: run a server until SIGINT or SIGTERM, with its log and its progress bars."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from trioengine.actors.engine import Engine
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.cli.logs import configure_logs, log_what_python_prints, logged_workers
from trioengine.cli.progress import Bars, progress_bars
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.hub.pull import locate
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve

if TYPE_CHECKING:
    from trioengine.serve.server import Server

logger = logging.getLogger("trioengine")


def run_server(
    config: EngineConfig, serve_config: ServeConfig, *, log_level: str = "info", log_json: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM. Raises EngineError if the server cannot run."""
    configure_logs(log_level, as_json=log_json)
    if log_json:
        log_what_python_prints()
    raise_fd_limit()
    for model in filter(None, (config.model, config.draft_model)):
        locate(model)  # raises before the server listens, if the name cannot be a model's
    trio.run(_serve_with_log, config, serve_config, nullcontext() if log_json else progress_bars())


async def _serve_with_log(
    config: EngineConfig, serve_config: ServeConfig, showing: AbstractContextManager[Bars | None]
) -> None:
    async with logged_workers() as ports:
        await _serve(partial(serve, config, serve_config, ports=ports), serve_config.shutdown_timeout, showing)


async def _serve(
    serving: partial[Coroutine[Any, Any, None]],
    shutdown_timeout: float,
    showing: AbstractContextManager[Bars | None],
) -> None:
    with showing as bars, trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async with open_unwrapped_nursery() as nursery:
            run = serving if bars is None else partial(serving, on_progress=bars.download, on_load=bars.loading)
            async with open_unwrapped_nursery() as starting:
                starting.start_soon(_cancel_at_signal, received, nursery.cancel_scope)
                server = await nursery.start(_serve_then_cancel, run, nursery.cancel_scope)
                starting.cancel_scope.cancel()
            server.metrics.add_process()
            nursery.start_soon(obey_signals, received, server, shutdown_timeout)
            nursery.start_soon(freeze_gc_when_ready, server.engine)
            for address in server.addresses:
                logger.info("listening on %s://%s", server.scheme, address)
            logger.info("loading %s", server.engine.config.model)
    logger.info("stopped")


async def _serve_then_cancel(
    run: partial[object], scope: trio.CancelScope, *, task_status: trio.TaskStatus[object]
) -> None:
    """Serve, and cancel the tasks beside it when the server has ended."""
    await run(task_status=task_status)  # type: ignore[misc]
    scope.cancel()


COLLECT_AFTER = (10_000, 20, 20)  # thresholds of the garbage collector: objects, and collections of younger ones
HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1; other systems and older kernels refuse it, and nothing changes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \w+ \S+ 0 *(?:\[heap\])?$")


async def _cancel_at_signal(received: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel the start at the first signal: no request can be in flight. Cancelled itself, it takes no signal."""
    logger.info("%s: ending before the start is done", signal.Signals(await anext(received)).name)
    scope.cancel()


async def obey_signals(received: AsyncIterator[int], server: Server, shutdown_timeout: float) -> None:
    """Drain the server at the first signal that is received, abort at the second, die of the third.

    Runs until cancelled.
    """
    async with trio.open_nursery() as nursery:
        name = signal.Signals(await anext(received)).name
        logger.info(
            "%s: finishing the requests in flight, for at most %g s; a second signal aborts them",
            name,
            shutdown_timeout,
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
