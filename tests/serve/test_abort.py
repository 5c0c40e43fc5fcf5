"""The second signal: all clients get an outcome, and the server does not wait for clients that do not read."""

from contextlib import asynccontextmanager

import pytest
import trio
from helpers.clients import CHAT, Client, HttpClient, chat, events_of
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed, wrap_client_stream

from trioengine.core.lifecycle import Power
from trioengine.serve.config import ServeConfig
from trioengine.serve.server import ABORT_TIMEOUT, Server
from trioengine.testing import simulated_engine

LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


class Dialled(trio.abc.Listener):
    """Accepts the other ends of memory streams."""

    def __init__(self):
        self._send, self._receive = trio.open_memory_channel(8)

    def dial(self, pair=memory_stream_pair):
        ours, theirs = pair()
        self._send.send_nowait(theirs)
        return ours

    async def accept(self):
        return await self._receive.receive()

    async def aclose(self):
        self._receive.close()
        self._send.close()
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def running():
    """A server that runs, what it is dialled by, its simulation, and an event for its end."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        server, listener, ended = Server(engine, ServeConfig(served_model_name="toy")), Dialled(), trio.Event()

        async def run(task_status):
            await server.run([listener], task_status=task_status)
            ended.set()

        await nursery.start(run)
        yield server, listener, simulation, ended
        await ended.wait()


async def test_everybody_is_told(autojump_clock):
    async with running() as (server, listener, _, _), trio.open_nursery() as nursery:
        streamed, whole, idle = (HttpClient(listener.dial()) for _ in range(3))
        realtime = Client(await wrap_client_stream(nursery, listener.dial(), "localhost", "/v1/realtime"))
        assert (await idle.request("GET", "/health")).status == 200
        await streamed.send("POST", CHAT, chat(stream=True, max_tokens=400))
        await streamed.head()
        await whole.send("POST", CHAT, chat("you", max_tokens=400))
        await realtime.say("hello")
        await realtime.send("response.create", response=LONG)
        await realtime.until("response.output_text.delta")
        nursery.start_soon(server.drain, 1000)
        await wait_all_tasks_blocked()
        before = trio.current_time()
        server.abort()
        *_, error, done = events_of(await streamed.rest())
        assert (error["error"]["code"], done) == ("shutdown", "[DONE]")
        answer = await whole.answer()
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "shutdown", "1")
        assert await idle.stream.receive_some() == b""
        response = (await realtime.until("response.done"))["response"]
        assert response["status_details"]["error"]["code"] == "shutdown"
        with pytest.raises(ConnectionClosed) as closed:
            await realtime.next()
        assert closed.value.reason.code == 1001
        assert server.engine.statistics().power is Power.DRAINING
        assert trio.current_time() - before < ABORT_TIMEOUT


@pytest.mark.parametrize("who", ["client", "worker"])
async def test_who_does_not_answer_is_not_waited_for(autojump_clock, who):
    """A client that reads nothing, or a worker that hangs: the connection is closed without a word."""
    async with running() as (server, listener, simulation, ended):
        client = HttpClient(listener.dial(lockstep_stream_pair if who == "client" else memory_stream_pair))
        await client.send("POST", CHAT, chat(stream=True, max_tokens=400))
        await client.head()
        if who == "worker":
            simulation.worker.hang()
        before = trio.current_time()
        server.abort()
        await ended.wait()
        assert trio.current_time() - before == pytest.approx(ABORT_TIMEOUT)


async def test_no_goodbye_comes_in_the_middle_of_a_response(autojump_clock):
    """The client asks for one more while the last events are on their way to it."""
    async with running() as (server, listener, _, _), trio.open_nursery() as nursery:
        stream = listener.dial(lockstep_stream_pair)
        client = Client(await wrap_client_stream(nursery, stream, "localhost", "/v1/realtime"))
        await client.say("hello")
        server.abort()
        await client.send("response.create", response=LONG)
        response = (await client.until("response.done"))["response"]
        assert response["status_details"]["error"]["code"] == "shutting_down"
        with pytest.raises(ConnectionClosed) as closed:
            await client.next()
        assert closed.value.reason.code == 1001


async def test_a_session_whose_client_is_away(autojump_clock):
    """It runs in the server's own nursery, and ends with it."""
    async with running() as (server, listener, _, ended):
        async with trio.open_nursery() as nursery:
            stream = listener.dial()
            websocket = await wrap_client_stream(nursery, stream, "localhost", "/v1/realtime?resume=60")
            client = Client(websocket)
            await client.until("session.created")
            await client.say("hello")
            await client.send("response.create", response={"max_output_tokens": 400, "ignore_eos": True})
            await client.until("response.output_text.delta")
            await trio.aclose_forcefully(stream)
        await trio.testing.wait_all_tasks_blocked()
        assert (len(server.realtime.sessions), server.engine.statistics().running) == (1, 1)
        before = trio.current_time()
        server.abort()
        await ended.wait()
        assert trio.current_time() - before < 0.1
        assert (len(server.realtime.sessions), server.budget.num_bytes) == (0, 0)
