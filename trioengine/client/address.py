"""Where a server is, and how it is reached."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

import trio

from trioengine.core.errors import ConnectionLost, InvalidConfig

PATH = "/v1/realtime"
_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a connection needs: a stream, and what to say at its beginning."""

    authority: str  # the Host header
    target: str
    headers: list[tuple[bytes, bytes]]
    dial: Callable[[], Awaitable[trio.abc.Stream]]


@dataclass(frozen=True, slots=True)
class Address:
    """`authority` is what the server is called: the host, and the port if it is not the scheme's."""

    host: str
    port: int
    is_secure: bool
    authority: str
    target: str

    @classmethod
    def parse(cls, url: str, model: str | None) -> Self:
        """From ws(s):// or http(s)://; without a path, or with /v1, it is Realtime's. Raises InvalidConfig."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except (ValueError, AttributeError):
            raise _no_address(url) from None
        if parts.scheme not in _PORTS or not host or parts.username is not None or parts.fragment:
            raise _no_address(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
        if model is not None:
            query = [*((name, value) for name, value in query if name != "model"), ("model", model)]
        path = PATH if parts.path.rstrip("/") in ("", "/v1") else parts.path
        target = f"{path}?{urlencode(query)}" if query else path
        default = _PORTS[parts.scheme]
        return cls(host, port or default, default == 443, parts.netloc, target)

    async def dial(self) -> trio.abc.Stream:
        """A new connection. Raises ConnectionLost."""
        try:
            stream = await trio.open_tcp_stream(self.host, self.port)
            if not self.is_secure:
                return stream
            return trio.SSLStream(
                stream, ssl.create_default_context(), server_hostname=self.host, https_compatible=True
            )
        except OSError as exc:
            raise ConnectionLost(f"cannot connect to {self.authority}: {exc}") from exc


def _no_address(url: object) -> InvalidConfig:
    return InvalidConfig.of(
        "url", f"must be an address like http://localhost:8000 or ws://localhost:8000, got {url!r:.200}"
    )
