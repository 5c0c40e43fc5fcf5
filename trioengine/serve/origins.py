"""From where a request may come: the names of this server, and the web pages that may ask it.

Without a key only loopback names are served, so that no web page can reach the engine by DNS. With one, a page may ask
if it is this server's own, or of a site that is allowed: those get the headers of CORS, too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TypeAlias
from urllib.parse import urlsplit

from trioengine.core.serve_config import ServeConfig
from trioengine.serve.http import Request, Response

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
PREFLIGHT_AGE = b"600"  # seconds that a browser need not ask again


def is_loopback(host: str) -> bool:
    """Whether a name or an address without a port stands for this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Origins:
    """The rules of one server."""

    def __init__(self, config: ServeConfig) -> None:
        self._has_keys = config.has_keys
        self._loopback_only = not config.has_keys and not config.insecure
        self._allowed = {origin.encode() for origin in config.allowed_origin}

    def refusal(self, headers: Headers) -> str | None:
        """Why a request with these headers is refused; None: it is not."""
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin" and value not in self._allowed]
        if self._loopback_only:
            if len(hosts) != 1 or not _is_loopback_url(b"//" + hosts[0]):
                return "the Host header must name localhost: there is no key"
            if not all(map(_is_loopback_url, origins)):
                return "the Origin must be localhost or an --allowed-origin: there is no key"
        elif self._has_keys and not all(origin.partition(b"://")[2] in hosts for origin in origins):
            return "the Origin must be this server's or an --allowed-origin"
        return None

    def headers(self, request: Request) -> tuple[tuple[bytes, bytes], ...]:
        """What every response to this request says to browsers."""
        if not self._allowed:
            return ()
        vary = (b"vary", b"origin")
        origin = self._allowed_origin(request)
        if origin is None:
            return (vary,)
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
        return ((b"access-control-allow-origin", origin), exposed, vary)

    def preflight(self, request: Request, methods: Iterable[str]) -> Response | None:
        """The answer to a browser that asks whether its page may ask; None: it is no such request."""
        asked = request.header(b"access-control-request-method")
        if request.method != "OPTIONS" or asked is None or self._allowed_origin(request) is None:
            return None
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", PREFLIGHT_AGE),
        ]
        wanted = request.header(b"access-control-request-headers")
        if wanted is not None:
            headers.append((b"access-control-allow-headers", wanted))
        return Response(200, b"", b"text/plain", tuple(headers))

    def _allowed_origin(self, request: Request) -> bytes | None:
        origin = request.header(b"origin")
        return origin if origin in self._allowed else None


def _is_loopback_url(url: bytes) -> bool:
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False
