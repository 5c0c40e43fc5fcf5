"""`bench serve` over WebSocket: its load on our own server and on one that refuses, and sessions that are idle."""

from contextlib import asynccontextmanager

import pytest
import trio
from helpers.scripted_server import ScriptedServer, plain
from trio.testing import memory_stream_pair

from trioengine import EngineError
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import End, LengthUnit, Prompts, run_load
from trioengine.cli.bench.serve import measure
from trioengine.client.address import Endpoint
from trioengine.serve.config import ServeConfig
from trioengine.serve.server import Server
from trioengine.testing import simulated_engine

PROMPTS = Prompts([" a", " b"], LengthUnit.WORDS)


@asynccontextmanager
async def our_server(**options):
    """Its engine, its endpoint, and the streams that it still serves."""
    served = []
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery:
        server = Server(engine, ServeConfig(served_model_name="toy", **options))

        async def serve(stream):
            served.append(stream)
            await server.connections.handle(stream)
            served.remove(stream)

        async def open_stream():
            ours, theirs = memory_stream_pair()
            nursery.start_soon(serve, theirs)
            return ours

        yield engine, Endpoint("localhost", "/", [], open_stream), served
        server.connections.close_idle()


async def test_sessions_that_are_idle_meanwhile(autojump_clock, monkeypatch):
    counts = []

    async def load(*arguments):
        await trio.sleep(5 * ServeConfig().client_ping_interval)  # simulated; pings are to be answered meanwhile
        counts.append(len(served))
        return await run_load(*arguments)

    monkeypatch.setattr("trioengine.cli.bench.serve.run_load", load)
    async with our_server() as (_, endpoint, served):
        result = await measure(BenchConfig(num_prompts=2, random_output_len=3, idle_sessions=5), endpoint, PROMPTS)
        assert [sample.end for sample in result.run.samples] == [End.COMPLETED] * 2
        await trio.testing.wait_all_tasks_blocked()
        assert (counts, served) == ([5], [])


async def test_a_server_that_takes_no_more_idle_sessions(autojump_clock):
    async with our_server(max_connections=3) as (_, endpoint, _):
        with pytest.raises(EngineError, match=r"an idle session of .*: the WebSocket handshake failed: HTTP 503"):
            await measure(BenchConfig(num_prompts=1, idle_sessions=5), endpoint, PROMPTS)


async def test_realtime_on_our_server(autojump_clock):
    config = BenchConfig(
        backend="realtime", num_prompts=6, random_input_len=3, random_output_len=8, ignore_eos=True, leave=50
    )
    async with our_server() as (engine, endpoint, _):
        result = await measure(config, endpoint, PROMPTS)
        while engine.statistics().sessions:
            await engine.runtime.gate.changed()
        await engine.check_invariants()
        assert engine.statistics().aborted > 0
    stayed = [sample for sample in result.run.samples if sample.end is End.COMPLETED]
    assert len(stayed) == 3
    for sample in stayed:
        assert sample.output_tokens == 8
        assert 0 < sample.ttft <= sample.e2el


async def test_a_model_that_our_server_has_not(autojump_clock):
    async with our_server() as (_, endpoint, _):
        with pytest.raises(
            EngineError, match="handshake failed: HTTP 404: model 'gpt' not found; this server serves 'toy'"
        ):
            await measure(BenchConfig(backend="realtime", model="gpt"), endpoint, PROMPTS)


HANDSHAKES = [
    (plain(404, b"{}"), "the WebSocket handshake failed: HTTP 404"),
    (plain(401, b'{"error": {"message": "no"}}'), r"the WebSocket handshake failed: HTTP 401: no \(--api-key\)$"),
    (b"nonsense\r\n\r\n", "the server's WebSocket was closed with 1006: the server does not speak WebSocket"),
    (None, "the server's WebSocket was closed with 1006"),
]


@pytest.mark.parametrize(("said", "complaint"), HANDSHAKES)
async def test_realtime_errors(autojump_clock, said, complaint):
    async def handle(stream):
        await (stream.aclose() if said is None else stream.send_all(said))

    async with trio.open_nursery() as nursery:
        server = ScriptedServer(nursery, b"")
        server._handle = handle
        with trio.fail_after(60), pytest.raises(EngineError, match=complaint):
            await measure(BenchConfig(backend="realtime"), server.endpoint, PROMPTS)
