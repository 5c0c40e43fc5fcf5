"""The start of a server: first its worker, which takes longest; while that loads, the modules that serve clients.

So this file imports no more than the engine and the checks need that come before a worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.ports import Ports
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.config import EngineConfig
from trioengine.core.errors import InvalidConfig
from trioengine.core.wording import brief
from trioengine.serve.config import ServeConfig
from trioengine.serve.listening import check_exposure, listen

if TYPE_CHECKING:
    import ssl

    from trioengine.serve.server import Server

logger = logging.getLogger("trioengine")
MIN_KEY_LENGTH = 16  # characters; shorter keys are warned about
HEAD_START = 1.0  # seconds at most before the modules of the server are imported: a download may take minutes


async def serve(
    config: EngineConfig | None = None,
    serve_config: ServeConfig | None = None,
    *,
    ports: Ports | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an engine until the server is drained or aborted, or this is cancelled. It listens before the model loads.

    Connections beyond `max_connections`, or beyond the limit of file descriptors, are answered with 503. Raises
    InvalidConfig for an address that other machines reach without a key, unless `insecure`, for a `weights_dir`
    other than a directory, and for an unusable certificate; EngineError when it cannot listen, or the engine cannot
    run.
    """
    serve_config = ServeConfig() if serve_config is None else serve_config
    if serve_config.weights_dir is not None and not await trio.Path(serve_config.weights_dir).is_dir():
        raise InvalidConfig.of("weights_dir", f"must be a directory, got {brief(serve_config.weights_dir)}")
    await check_exposure(serve_config)
    tls = await _tls_context(serve_config)
    _warn_of_short_keys(serve_config)
    engine = Engine(config, ports=ports, on_progress=on_progress, on_load=on_load)
    listeners = await listen(serve_config)
    try:
        async with open_unwrapped_nursery() as nursery:
            nursery.start_soon(partial(_run_engine, engine, nursery.cancel_scope))
            try:
                with trio.move_on_after(HEAD_START):
                    await engine.runtime.supervisor.spawned.wait()
                make_server = await engine.ports.run_in_thread(_import_server)
                await make_server(engine, serve_config, tls).run(listeners, task_status=task_status)
            finally:
                engine.close()
    finally:
        for listener in listeners:
            listener.socket.close()  # the server has done so, if it was made


async def _run_engine(engine: Engine, scope: trio.CancelScope) -> None:
    await engine.run()
    scope.cancel()


async def _tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Return the context of a server with a certificate; None without. Raises InvalidConfig for unusable files."""
    if config.ssl_certfile is None:
        return None
    from trioengine.serve.tls import tls_context

    return await trio.to_thread.run_sync(tls_context, config)


def _import_server() -> type[Server]:
    from trioengine.serve.server import Server

    return Server


def _warn_of_short_keys(config: ServeConfig) -> None:
    """Log a warning for each option with a key that can be guessed; keys are not shown."""
    for flag, keys in (("--api-key", config.api_key), ("--admin-key", config.admin_key)):
        if any(len(key) < MIN_KEY_LENGTH for key in keys):
            logger.warning("a key of %s has fewer than %d characters, and may be guessed", flag, MIN_KEY_LENGTH)
