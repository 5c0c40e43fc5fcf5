"""From where a request may come: the names of this server, and the web pages that may ask it.

Without a key only loopback names are served, so that no web page can reach the engine by DNS. With one, a page may ask
if it is this server's own. Pages of a site that is allowed, and without a key those of this machine, get the headers of
CORS, too.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from trioengine.serve.config import ServeConfig
from trioengine.serve.http import Request, Response
from trioengine.serve.request_head import is_plain_origin, name_of_host, name_of_origin

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
logger = logging.getLogger("trioengine")
OPAQUE = b"null"  # the origin of a page that has none, as a file or a sandboxed frame
_SHOWN = 100  # bytes
PREFLIGHT_AGE = b"600"  # seconds that a browser need not ask again


def is_loopback(host: str) -> bool:
    """Whether a name or an address without a port stands for this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Refusal(NamedTuple):
    """The status and the error of a request that is refused."""

    status: int
    code: str
    message: str


class Origins:
    """The rules of one server."""

    def __init__(self, config: ServeConfig) -> None:
        self._has_keys = config.has_keys
        self._loopback_only = not config.has_keys and not config.insecure
        self._allowed = {origin.encode() for origin in config.allowed_origin}

    def refusal(self, headers: Headers) -> Refusal | None:
        """Why a request with these headers is refused; None: it is not. A refused Host or Origin is logged."""
        hosts = [value for name, value in headers if name == b"host"]
        if self._loopback_only and not any(is_loopback(name_of_host(host)) for host in hosts):
            return _refused_host(hosts)
        origins = [value for name, value in headers if name == b"origin" and value not in self._allowed]
        for origin in origins:
            refusal = self._refusal_of(origin, hosts)
            if refusal is not None:
                _log_refused(origin)
                return refusal
        return None

    def _refusal_of(self, origin: bytes, hosts: list[bytes]) -> Refusal | None:
        """Why a page of an origin that is not an allowed one may not ask, if so."""
        name = name_of_origin(origin)
        if not name and origin != OPAQUE:
            rule = "the Origin must be http:// or https:// and a host, or an --allowed-origin"
            return Refusal(400, "bad_request", rule)
        if self._loopback_only and not is_loopback(name):
            rule = "the Origin must be localhost or an --allowed-origin: there is no key"
            return Refusal(403, "forbidden", rule)
        if self._has_keys and origin.partition(b"://")[2] not in hosts:
            return Refusal(403, "forbidden", "the Origin must be this server's or an --allowed-origin")
        return None

    def headers(self, request: Request) -> tuple[tuple[bytes, bytes], ...]:
        """What every response to this request says to browsers."""
        vary = (b"vary", b"origin")
        origin = self._allowed_origin(request)
        if origin is None:
            return (vary,) if self._allowed else ()
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
        if origin is None or origin in self._allowed:
            return origin
        return origin if self._loopback_only and is_loopback(name_of_origin(origin)) else None


def _refused_host(hosts: list[bytes]) -> Refusal:
    """Of a server without a key; the flags that would allow the Host are named, in the log as well."""
    host = (hosts[0] if hosts else b"")[:_SHOWN].decode("ascii", "backslashreplace")
    logger.warning("a request was refused for its Host %r; --api-key KEY (or --insecure) would allow any Host", host)
    rule = "is not a loopback name such as localhost; a server with --api-key (or --insecure) serves any Host"
    return Refusal(403, "forbidden", f"the Host {host!r} {rule}")


def _log_refused(origin: bytes) -> None:
    """Warn, with the flag that would allow the origin if there is one; it is safe to be pasted into a shell."""
    if len(origin) <= _SHOWN and is_plain_origin(origin):
        flag = origin.decode().lower()
        logger.warning("a page was refused for its Origin; --allowed-origin %s would allow it", flag)
    else:
        logger.warning("a page was refused for its Origin %r; no --allowed-origin can name it", origin[:_SHOWN])
