"""SIGINT and SIGTERM: the first drains, the second aborts, the third kills."""

from __future__ import annotations

import logging
import os
import signal

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
