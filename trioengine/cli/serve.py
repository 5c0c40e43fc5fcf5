"""`trioengine serve`: run a server until SIGINT or SIGTERM, with its log and its progress bars."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.cli.logs import configure_logs, log_what_python_prints, logged_workers
from trioengine.cli.process import freeze_gc_when_ready, obey_signals, raise_fd_limit
from trioengine.core.config import EngineConfig
from trioengine.hub.pull import locate
from trioengine.serve.config import ServeConfig
from trioengine.serve.server import serve

if TYPE_CHECKING:
    from trioengine.cli.progress import Bars

logger = logging.getLogger("trioengine")


def run_server(
    config: EngineConfig, serve_config: ServeConfig, *, log_level: str = "info", log_json: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM. Raises EngineError if the server cannot run."""
    configure_logs(log_level, as_json=log_json)
    if log_json:
        log_what_python_prints()
    raise_fd_limit()
    locate(config.model)  # raises before the server listens, if the name cannot be a model's
    trio.run(_serve_with_log, config, serve_config, nullcontext() if log_json else _bars())


def _bars() -> AbstractContextManager[Bars]:
    """Progress bars. They are not JSON, and a server without them does not import their library."""
    from trioengine.cli.progress import progress_bars

    return progress_bars()


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
    with showing as bars:
        async with open_unwrapped_nursery() as nursery:
            run = serving if bars is None else partial(serving, on_progress=bars.download, on_load=bars.loading)
            server = await nursery.start(_serve_then_cancel, run, nursery.cancel_scope)
            nursery.start_soon(obey_signals, server, shutdown_timeout)
            nursery.start_soon(freeze_gc_when_ready, server.engine)
            for address in server.addresses:
                logger.info("listening on http://%s", address)
            logger.info("loading %s", server.engine.config.model)
    logger.info("stopped")


async def _serve_then_cancel(
    run: partial[object], scope: trio.CancelScope, *, task_status: trio.TaskStatus[object]
) -> None:
    """Serve, and cancel the tasks beside it when the server has ended."""
    await run(task_status=task_status)  # type: ignore[misc]
    scope.cancel()
