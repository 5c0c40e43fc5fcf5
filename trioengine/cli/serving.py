"""`trioengine serve`: the server as a process, with its log and its signals."""

from __future__ import annotations

import logging
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

import trio

from trioengine.actors.nursery import open_unwrapped_nursery
from trioengine.cli.progress import download_bar
from trioengine.core.config import EngineConfig
from trioengine.core.serve_config import ServeConfig
from trioengine.hub.pull import located
from trioengine.serve.descriptors import raise_limit
from trioengine.serve.server import serve
from trioengine.serve.signals import obey_signals

logger = logging.getLogger("trioengine")


def serve_until_told(config: EngineConfig, serve_config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises EngineError when it cannot."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_limit()
    located(config.model)  # what can be no model is refused before anything listens
    run = partial(serve, config, serve_config)
    trio.run(_serve, run, serve_config.shutdown_timeout)


async def _serve(serving: partial[Coroutine[Any, Any, None]], shutdown_timeout: float) -> None:
    with download_bar() as progress:
        async with open_unwrapped_nursery() as nursery:
            run = partial(serving, on_progress=progress)
            server = await nursery.start(_and_then_cancel, run, nursery.cancel_scope)
            nursery.start_soon(obey_signals, server, shutdown_timeout)
            for address in server.addresses:
                logger.info("listening on http://%s", address)
    logger.info("stopped")


async def _and_then_cancel(
    run: partial[object], scope: trio.CancelScope, *, task_status: trio.TaskStatus[object]
) -> None:
    """Serve, and when that is over, end the tasks beside it."""
    await run(task_status=task_status)  # type: ignore[misc]
    scope.cancel()
