"""Faults of TLS: the error names the fault and the remedy, over the WebSocket as over HTTP."""

import re
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers.loopback import on_loopback

from trioengine import ConnectionLost, connect
from trioengine.client.address import Address

CERTIFICATE = Path(__file__).parents[1] / "data" / "self_signed.pem"  # of localhost, with its key


@asynccontextmanager
async def listening(handler):
    async with trio.open_nursery() as nursery:
        (listener, *_) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, handler, [listener])
        yield f"https://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


async def hang_up(stream):
    await stream.receive_some()
    await stream.aclose()


async def offer_self_signed(stream):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    with pytest.raises(trio.BrokenResourceError):
        await trio.SSLStream(stream, context, server_side=True).do_handshake()


async def dialled(url):
    with pytest.raises(ConnectionLost) as lost:
        await Address.parse(url, None).dial()
    return str(lost.value)


async def test_a_certificate_that_is_not_trusted():
    async with listening(offer_self_signed) as url:
        assert await dialled(url) == (
            f"cannot connect to {url}: the certificate is not trusted: self-signed certificate; "
            "a file of certificates to trust is named by the variable SSL_CERT_FILE"
        )


async def test_a_server_that_speaks_no_tls():
    async with on_loopback() as server:
        url = f"https://127.0.0.1:{server.port}"
        remedy = f"the server does not speak TLS; use http://127.0.0.1:{server.port}"
        assert await dialled(url) == f"cannot connect to {url}: {remedy}"
        with pytest.raises(ConnectionLost, match=re.escape(remedy)):
            async with connect(url) as client, client.open_session():
                pass


async def test_a_server_that_hangs_up_in_the_handshake():
    async with listening(hang_up) as url:
        assert await dialled(url) == f"cannot connect to {url}: the server broke the TLS handshake off"
