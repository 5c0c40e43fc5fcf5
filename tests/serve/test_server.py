"""The server as a whole, on a loopback port: it listens before it is ready, drains, aborts, reports errors."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio
import trio.testing
from helpers.clients import Client, read_all, status_and_body
from trio_websocket import ConnectionClosed, wrap_client_stream

from trioengine import EngineConfig, EngineError, InvalidConfig, WorkerLost
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.cli.serve import obey_signals
from trioengine.core.messages import Fatal, FatalCode
from trioengine.serve.config import ServeConfig
from trioengine.serve.connection import enable_keepalive
from trioengine.serve.listening import format_address
from trioengine.serve.server import Server
from trioengine.serve.startup import serve
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour

QUICK = Behaviour(load_time=0, step_time=0.001)
CONFIG = EngineConfig(model="toy", max_num_seqs=8)
SHORT = {"temperature": 0, "max_output_tokens": 5, "ignore_eos": True}
LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


class Running:
    """A server that runs, and what is known of it."""

    def __init__(self, server, simulation):
        self.server = server
        self.simulation = simulation
        self.ended = trio.Event()


@asynccontextmanager
async def running(behaviour=QUICK):
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery, behaviours=[behaviour])
        serving = partial(serve, CONFIG, ServeConfig(port=0), ports=simulation.ports)
        state = Running(None, simulation)

        async def run(task_status):
            await serving(task_status=task_status)
            state.ended.set()

        state.server = await nursery.start(run)
        yield state
        state.server.abort()
        await state.ended.wait()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def realtime(server):
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream, open_unwrapped_nursery() as nursery:
        websocket = await wrap_client_stream(nursery, stream, "127.0.0.1", "/v1/realtime")
        client = Client(websocket)
        assert (await client.next())["type"] == "session.created"
        yield client
        await websocket.aclose()
        nursery.cancel_scope.cancel()


async def get(server, path):
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\n\r\n".encode())
        return status_and_body(await read_all(stream, silence=60))


async def test_it_listens_before_the_engine_is_ready():
    async with running(Behaviour(load_time=1000)) as state:
        assert await get(state.server, "/health") == (200, {"status": "ok"})
        assert await get(state.server, "/ready") == (503, {"state": "loading"})
        async with realtime(state.server) as client:
            response = await client.ask("hello")
            assert response["status_details"]["error"]["code"] == "overloaded"
            error = next(event["error"] for event in client.events if event["type"] == "error")
            assert error["retry_after"] > 0


async def test_a_conversation_over_a_real_socket():
    async with running() as state:
        await state.server.engine.ready()
        async with realtime(state.server) as client:
            assert (await client.ask("hello", **SHORT))["status"] == "incomplete"
        while state.server.engine.statistics().sessions:
            await state.server.engine.runtime.gate.changed()
        await state.server.engine.check_invariants()


async def test_drain_finishes_what_is_in_flight():
    """Idle connections are closed, the busy one gets its answer and a clean close; then the server is over."""
    async with running() as state:
        await state.server.engine.ready()
        async with realtime(state.server) as busy, realtime(state.server) as idle:
            await busy.say("hello")
            await busy.send("response.create", response=LONG)
            await busy.until("response.output_text.delta")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(state.server.drain)
                response = (await busy.until("response.done"))["response"]
            assert response["usage"]["output_tokens"] == 400
            for client in (busy, idle):
                with pytest.raises(ConnectionClosed) as closed:
                    await client.until("anything else")
                assert client.events[-1]["type"] in ("engine.state", "response.done")
                assert closed.value.reason.code == 1001
        await state.ended.wait()
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("127.0.0.1", state.server.port)
        assert state.server.engine.statistics().finished == 1


async def test_drain_aborts_what_takes_too_long():
    async with running(Behaviour(load_time=0, step_time=0.05)) as state:
        await state.server.engine.ready()
        async with realtime(state.server) as client:
            await client.say("hello")
            await client.send("response.create", response=LONG)
            await client.until("response.output_text.delta")
            assert not await state.server.drain(0.01)
            response = (await client.until("response.done"))["response"]
            assert response["status_details"]["error"]["code"] == "shutdown"
        await state.ended.wait()


async def test_a_request_while_it_drains_is_refused():
    async with running(Behaviour(load_time=0, step_time=0.01)) as state:
        await state.server.engine.ready()
        async with realtime(state.server) as busy, realtime(state.server) as late:
            await busy.say("hello")
            await busy.send("response.create", response=LONG | {"max_output_tokens": 50})
            await busy.until("response.output_text.delta")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(state.server.drain)
                await trio.testing.wait_all_tasks_blocked()
                response = await late.ask("hello", **SHORT)
                assert response["status_details"]["error"]["code"] == "shutting_down"
                assert (await busy.until("response.done"))["response"]["status"] == "incomplete"
        await state.ended.wait()


async def receive_and_obey_signals(server):
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        await obey_signals(received, server, 1000.0)


async def test_the_first_signal_drains_and_the_second_aborts():
    async with running(Behaviour(load_time=0, step_time=0.05)) as state, trio.open_nursery() as nursery:
        await state.server.engine.ready()
        nursery.start_soon(receive_and_obey_signals, state.server)
        async with realtime(state.server) as client:
            await client.say("hello")
            await client.send("response.create", response=LONG)
            await client.until("response.output_text.delta")
            signal.raise_signal(signal.SIGTERM)
            await client.until("response.output_text.delta")
            assert not state.ended.is_set()
            signal.raise_signal(signal.SIGINT)
            response = (await client.until("response.done"))["response"]
            assert response["status_details"]["error"]["code"] == "shutdown"
            with pytest.raises(ConnectionClosed):
                await client.next()
        await state.ended.wait()
        assert state.server.engine.statistics().aborted == 1
        nursery.cancel_scope.cancel()


STUBBORN = """
import signal

import trio
import trio.testing
from trioengine.cli.serve import obey_signals

class Stubborn:
    async def drain(self, timeout):
        print("draining", flush=True)
        await trio.sleep_forever()

    def abort(self):
        print("aborting", flush=True)

async def main():
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey_signals, received, Stubborn(), 1.0)
            await trio.testing.wait_all_tasks_blocked()
            print("ready", flush=True)

trio.run(main)
"""


def test_the_third_signal_kills():
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    try:
        for line in ("ready", "draining", "aborting"):
            assert process.stdout.readline().strip() == line
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_an_engine_that_cannot_start_ends_the_server(autojump_clock):
    with pytest.raises(WorkerLost, match="no such thing"):
        async with running(Behaviour(fatal=Fatal(FatalCode.INTERNAL, "no such thing", ""))) as state:
            await state.ended.wait()


async def test_a_port_is_free_again_when_the_first_worker_cannot_be_started(autojump_clock):
    simulation, port = Simulation(), await free_port()
    simulation.failing_starts = 1
    with pytest.raises(WorkerLost, match="made not to start"):
        await serve(CONFIG, ServeConfig(port=port), ports=simulation.ports)
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    await listener.aclose()


async def test_a_server_accepts_clients_while_its_model_is_fetched(autojump_clock):
    async def fetch(model, progress):
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        ports = replace(Simulation().ports, find_model=fetch)
        server = await nursery.start(partial(serve, CONFIG, ServeConfig(port=0), ports=ports))
        assert server.port != 0
        server.abort()


async def free_port():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        return listener.socket.getsockname()[1]


class Names(trio.abc.HostnameResolver):
    """Knows every name but those in .invalid."""

    async def getaddrinfo(self, host, *others):
        if host.endswith(b".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known; choose another --host$")
        return []

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError


@pytest.fixture
async def names():
    before = trio.socket.set_custom_hostname_resolver(Names())
    yield
    trio.socket.set_custom_hostname_resolver(before)


async def test_a_name_that_is_none_is_not_called_reachable(names):
    with pytest.raises(EngineError, match=r"cannot listen on nohost\.invalid:0: Name or service not known"):
        await serve(CONFIG, ServeConfig("nohost.invalid", 0))


async def test_an_address_that_others_reach_is_refused(names):
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.com"):
        with pytest.raises(InvalidConfig, match=f"host {host} .* --insecure"):
            await serve(CONFIG, ServeConfig(host, 0))


async def test_a_port_that_is_taken():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        with pytest.raises(EngineError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*in use; choose another --port$"):
            await serve(CONFIG, ServeConfig("127.0.0.1", listener.socket.getsockname()[1]))


async def test_a_host_that_can_be_no_name():
    with pytest.raises(EngineError, match=r"cannot listen on a\.\.b:0: .*label.*; choose another --host$"):
        await serve(CONFIG, ServeConfig("a..b", 0, insecure=True))


async def test_a_server_that_cannot_be_made_holds_no_port():
    port = await free_port()
    with pytest.raises(InvalidConfig, match="config must be an EngineConfig, got 'no configuration'"):
        await serve("no configuration", ServeConfig("127.0.0.1", port))
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    await listener.aclose()


async def test_every_address_is_told(autojump_clock):
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery:
        server = Server(engine)
        listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(2)]
        await nursery.start(server.run, listeners)
        ports = [listener.socket.getsockname()[1] for listener in listeners]
        assert server.port == ports[0]
        assert server.addresses == tuple(f"127.0.0.1:{port}" for port in ports)
        server.abort()
    assert format_address("::1", 80) == "[::1]:80"


async def test_events_are_json_on_the_wire():
    async with running() as state, realtime(state.server) as client:
        await client.websocket.send_message(json.dumps({"type": "session.update", "session": {"instructions": "ä€😀"}}))
        assert (await client.until("session.updated"))["session"]["instructions"] == "ä€😀"


async def test_the_kernel_watches_accepted_sockets():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1]):
        async with await listener.accept() as accepted:
            enable_keepalive(accepted)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
