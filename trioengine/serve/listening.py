"""The addresses of a server: it listens on them, and other machines reach some of them."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import trio

from trioengine.core.errors import EngineError, InvalidConfig
from trioengine.serve.config import ServeConfig


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether a name or an address without a port stands for this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """Return host and port as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def check_exposure(config: ServeConfig) -> None:
    """Raise InvalidConfig for an address that other machines reach without a key, unless `insecure`.

    Raises EngineError for an unknown name.
    """
    if config.has_keys or config.insecure or is_loopback(config.host):
        return
    with _listening_on(config.host, config.port):
        await trio.socket.getaddrinfo(config.host, config.port)
    problem = f"{config.host} is reachable from other machines, and no key is set"
    raise InvalidConfig.of("host", f"{problem}: give an --api-key, or --insecure to serve all of them")


async def listen(config: ServeConfig) -> list[trio.SocketListener]:
    """Listen on the server's address. Raises EngineError where that is impossible."""
    with _listening_on(config.host, config.port):
        return await trio.open_tcp_listeners(config.port, host=config.host)


@contextmanager
def _listening_on(host: str, port: int) -> Iterator[None]:
    """Raise errors of listening as an EngineError with a hint."""
    try:
        yield
    except (OSError, ValueError) as exc:  # UnicodeError, for one, if it cannot be a name
        why = getattr(exc, "strerror", None) or exc
        if getattr(exc, "errno", None) == errno.EADDRINUSE:
            why = f"{why}; choose another --port"
        if isinstance(exc, socket.gaierror | UnicodeError):
            why = f"{why}; choose another --host"
        raise EngineError(f"cannot listen on {format_address(host, port)}: {why}") from exc
