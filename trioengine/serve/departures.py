"""Clients that disconnect: how many had something in flight, and the line of the log for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from wsproto.utilities import ProtocolError

from trioengine.serve.streaming import Disconnected

logger = logging.getLogger("trioengine")


class Departures:
    """One count for a server, of HTTP and WebSocket clients."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one where the body raises Disconnected, in a group or by itself."""
        try:
            yield
        except Disconnected:
            self.add()
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(Disconnected) is not None:
                self.add()
            raise


def log_disconnect(cause: BaseException | str) -> None:
    """The one line of a client that leaves, or is made to leave, over HTTP or WebSocket; it never quotes the client."""
    logger.info("client disconnected: %s", cause if isinstance(cause, str) else _reason(cause))


def _reason(error: BaseException) -> str:
    match error:
        case Disconnected():
            return str(error)
        case trio.TooSlowError():
            return "it did not read, send or answer in time"
        case ProtocolError():
            return "it broke the protocol"
        case _:
            return "it closed the connection"
