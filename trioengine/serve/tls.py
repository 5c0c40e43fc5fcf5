"""TLS on accepted connections."""

from __future__ import annotations

import ssl

import trio

from trioengine.core.errors import InvalidConfig
from trioengine.core.wording import brief
from trioengine.serve.body import CHUNK
from trioengine.serve.config import ServeConfig
from trioengine.serve.websocket import KeptOpen

CLOSE_TIMEOUT = 2.0  # seconds to send a close_notify, which a client that does not read would block
SILENCE = 0.05  # seconds
_NO_PASSWORD = ""  # without one, OpenSSL would ask for it on the terminal


def tls_context(config: ServeConfig) -> ssl.SSLContext:
    """Return the context of a server with a certificate. Raises InvalidConfig for unusable files."""
    assert config.ssl_certfile is not None, "a server without one speaks HTTP"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    fields = ("ssl_certfile",) if config.ssl_keyfile is None else ("ssl_certfile", "ssl_keyfile")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _NO_PASSWORD)
    except OSError as exc:  # also ssl.SSLError
        files = " and ".join(brief(getattr(config, field)) for field in fields)
        reason = getattr(exc, "reason", None) or exc.strerror or exc
        rule = "must be a certificate with its key, in PEM and without a password"
        raise InvalidConfig(f"{fields[0]} {rule}, got {files}: {reason}", fields=fields) from exc
    return context


class TlsStream(trio.abc.HalfCloseableStream):
    """The server's end of TLS over an accepted stream; `do_handshake` comes first.

    `send_eof` sends a close_notify and ends the stream below; after it, `receive_some` returns undecrypted bytes, which
    are to be discarded.
    """

    def __init__(self, stream: trio.abc.Stream, context: ssl.SSLContext) -> None:
        self._stream = stream
        self._tls = trio.SSLStream(KeptOpen(stream), context, server_side=True)
        self._has_ended = False

    async def do_handshake(self) -> None:
        """Shake hands. Raises BrokenResourceError for a client that does not speak TLS."""
        await self._tls.do_handshake()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await (self._stream if self._has_ended else self._tls).receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._tls.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._tls.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._discard_received()
        self._has_ended = True
        await self._tls.aclose()
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()

    async def _discard_received(self) -> None:
        """Read until the client is silent for a moment: OpenSSL sends no close_notify while records are unread."""
        silence = None
        while silence is None or not silence.cancelled_caught:
            with trio.move_on_after(SILENCE) as silence:
                if not await self._tls.receive_some(CHUNK):
                    return

    async def aclose(self) -> None:
        """Send a close_notify, for at most CLOSE_TIMEOUT, and close the stream below. Cancelled, it is closed too."""
        try:
            with trio.move_on_after(CLOSE_TIMEOUT):
                await self._tls.aclose()
        finally:
            await self._stream.aclose()
