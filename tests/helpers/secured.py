"""TLS in memory: a certificate of localhost, a server's context with it, and clients' ends of TLS that trust it."""

import ssl
from functools import cache
from pathlib import Path

import trio

from trioengine.serve.config import ServeConfig
from trioengine.serve.tls import tls_context

CERTIFICATE = str(Path(__file__).parents[1] / "data" / "self_signed.pem")  # of localhost, with its key
TRUSTING = ssl.create_default_context(cafile=CERTIFICATE)


@cache
def server_context() -> ssl.SSLContext | None:
    return tls_context(ServeConfig(ssl_certfile=CERTIFICATE))


def secured(stream: trio.abc.Stream) -> trio.SSLStream:
    """The client's end of TLS over the stream; the handshake comes with the first bytes, or by itself."""
    return trio.SSLStream(stream, TRUSTING, server_hostname="localhost")


async def end_sending(stream: trio.abc.HalfCloseableStream | trio.SSLStream) -> None:
    """Leave cleanly: half-close the stream; TLS is closed, for it has no half-closed state."""
    if isinstance(stream, trio.SSLStream):
        await stream.aclose()
    else:
        await stream.send_eof()
