"""A server with a certificate: HTTP and WebSocket over TLS, and clients that break TLS."""

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.lowlevel
from helpers.clients import chat, read_all, status_and_body
from helpers.secured import CERTIFICATE, TRUSTING

from trioengine import EngineConfig, InvalidConfig, connect
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour

CONFIG = EngineConfig(model="toy", max_num_seqs=8)
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def running(**options):
    async with open_unwrapped_nursery() as nursery:
        ports = Simulation(nursery, behaviours=[Behaviour(load_time=0, step_time=0.001)]).ports
        config = ServeConfig(port=0, ssl_certfile=CERTIFICATE, **options)
        server = await nursery.start(partial(serve, CONFIG, config, ports=ports))
        await server.engine.ready()
        yield server
        server.abort()
        nursery.cancel_scope.cancel()


async def secured(server):
    stream = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", server.port), TRUSTING, server_hostname="localhost")
    await stream.do_handshake()
    return stream


async def version_of(server):
    """The status of a request; reading ends at a close_notify, without which it would raise."""
    async with await secured(server) as stream:
        await stream.send_all(VERSION)
        return status_and_body(await read_all(stream))[0]


async def test_http_ends_with_a_close_notify():
    async with running() as server:
        assert server.scheme == "https"
        assert await version_of(server) == 200


async def test_a_refusal_reaches_a_client_that_still_sends():
    async with running() as server, await secured(server) as stream:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
        await stream.send_all(head + bytes(5_000_000))
        status, body = status_and_body(await read_all(stream))
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_a_stream_and_the_client_library():
    async with running() as server:
        async with await secured(server) as stream:
            body = json.dumps(chat(stream=True)).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            await stream.send_all(head.encode() + b"Connection: close\r\n\r\n" + body)
            assert b"data: [DONE]" in await read_all(stream)
        for scheme in ("https", "wss"):
            async with connect(f"{scheme}://localhost:{server.port}", ssl_context=TRUSTING) as client:
                completion = await client.generate("hello", max_tokens=3, ignore_eos=True)
                assert completion.usage.completion_tokens == 3


async def test_plain_http_is_closed():
    async with running() as server:
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as plain:
            await plain.send_all(VERSION)
            assert b"HTTP/1" not in await read_all(plain)
        assert await version_of(server) == 200


async def test_a_client_that_does_not_shake_hands_blocks_no_other():
    async with running(handshake_timeout=0.2) as server:
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as silent:
            assert await version_of(server) == 200
            assert await read_all(silent) == b""


async def test_a_drain_ends_connections_that_are_idle_or_shake_hands():
    async with running() as server:
        silent = await trio.open_tcp_stream("127.0.0.1", server.port)
        stream = await secured(server)
        await stream.send_all(VERSION.replace(b"Connection: close\r\n", b""))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        assert await server.drain(1)
        assert await stream.receive_some() == await read_all(silent) == b""
        await silent.aclose()
        await trio.aclose_forcefully(stream)


async def test_a_drain_ends_a_connection_whose_client_reads_nothing():
    async with running() as server:
        stream = await secured(server)
        await stream.send_all(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        await trio.lowlevel.checkpoint()
        await server.drain(0)
        server.abort()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
async def test_an_unusable_certificate(tmp_path, content):
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidConfig, match=r"^ssl_certfile must be a certificate with its key") as caught:
        await serve(CONFIG, ServeConfig(port=0, ssl_certfile=str(path)))
    assert caught.value.fields == ("ssl_certfile",)


def test_a_key_without_a_certificate():
    with pytest.raises(InvalidConfig, match="ssl_keyfile is the key of an ssl_certfile"):
        ServeConfig(ssl_keyfile="key.pem")


async def test_an_ssl_context_of_another_type():
    with pytest.raises(InvalidConfig, match=r"ssl_context must be an ssl\.SSLContext, got 'x'"):
        async with connect("https://localhost", ssl_context="x"):
            pass
