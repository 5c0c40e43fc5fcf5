"""The address of a server, and connecting to it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

import trio

from trioengine.core.errors import ConnectionLost, InvalidConfig

PATH = "/v1/realtime"
_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}

_UNKNOWN_ISSUER = (18, 19, 20, 21)  # OpenSSL's codes for self-signed and for untrusted issuers
_TRUST = "a file of certificates to trust is named by the variable SSL_CERT_FILE"
_NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
)  # OpenSSL's reasons for an answer without TLS
_END = "UNEXPECTED_EOF_WHILE_READING"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to open a connection: the stream, and the request of the WebSocket handshake."""

    authority: str  # the Host header
    target: str
    headers: list[tuple[bytes, bytes]]
    dial: Callable[[], Awaitable[trio.abc.Stream]]


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a server's URL; `authority` is the host, and the port if the URL has one."""

    host: str
    port: int
    is_secure: bool
    authority: str
    target: str

    @classmethod
    def parse(cls, url: str, model: str | None) -> Self:
        """Parse a URL with ws(s):// or http(s)://. Without a path, or with /v1, the path is /v1/realtime.

        Raises InvalidConfig.
        """
        try:
            parts = urlsplit(url)
            url.encode("ascii")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # raises UnicodeError for invalid names, such as "a..b"
        except (ValueError, AttributeError) as exc:
            if "out of range" in str(exc):
                raise InvalidConfig.of("url", f"must have a port from 1 to 65535, got {url!r:.200}") from None
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

    async def dial(self, context: ssl.SSLContext | None = None) -> trio.abc.Stream:
        """Open a connection; over TLS by this context, None: the system's certificates. Raises ConnectionLost."""
        try:
            stream = await trio.open_tcp_stream(self.host, self.port)
            return await self._secured(stream, context) if self.is_secure else stream
        except OSError as exc:
            raise self._unreachable(_reason(exc)) from exc
        except trio.BrokenResourceError as exc:
            raise self._unreachable(self._tls_fault(exc.__cause__)) from exc

    async def _secured(self, stream: trio.abc.Stream, context: ssl.SSLContext | None) -> trio.abc.Stream:
        """Shake hands for TLS on the stream."""
        context = context or ssl.create_default_context()
        secured = trio.SSLStream(stream, context, server_hostname=self.host, https_compatible=True)
        try:
            await secured.do_handshake()
            return secured
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    def _tls_fault(self, error: BaseException | None) -> str:
        """Describe the failure of a TLS handshake, and its remedy."""
        if isinstance(error, ssl.SSLCertVerificationError):
            remedy = f"; {_TRUST}" if error.verify_code in _UNKNOWN_ISSUER else ""
            return f"the certificate is not trusted: {error.verify_message}{remedy}"
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            return f"the server does not speak TLS; use http://{self.authority}"
        if isinstance(error, ssl.SSLError) and error.reason not in (None, _END):
            return f"the TLS handshake failed: {str(error.reason).replace('_', ' ').lower()}"
        return "the server broke the TLS handshake off"

    def _unreachable(self, reason: str) -> ConnectionLost:
        return ConnectionLost(f"cannot connect to {'https' if self.is_secure else 'http'}://{self.authority}: {reason}")


def _reason(error: OSError) -> str:
    """The system's messages for the failed attempts, each once."""
    attempts = error.__cause__.exceptions if isinstance(error.__cause__, ExceptionGroup) else (error,)
    if all(isinstance(attempt, ConnectionRefusedError) for attempt in attempts):
        return "connection refused; is 'trioengine serve' running there?"
    return ", ".join(dict.fromkeys(map(_of_the_system, attempts)))


def _of_the_system(error: Exception) -> str:
    number = getattr(error, "errno", None)
    text = os.strerror(number) if number is not None and number > 0 else getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]


def _no_address(url: object) -> InvalidConfig:
    return InvalidConfig.of(
        "url", f"must be an address like http://localhost:8000 or ws://localhost:8000, got {url!r:.200}"
    )
