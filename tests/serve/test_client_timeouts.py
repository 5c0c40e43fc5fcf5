"""trioengine.connect and servers that do not answer: a timeout raises TimedOut at the deadline, with the part."""

import pytest
import trio
from helpers.params import GREEDY, LONG
from helpers.realtime_texts import assistant, reference, user

from trioengine import ConnectionLost, TimedOut, connect
from trioengine.client.connection import PING_INTERVAL
from trioengine.core.types import Cause, FinishReason


class Gate(trio.abc.Stream):
    """A connection whose other end stops reading and writing, as under SIGSTOP, until it goes on."""

    def __init__(self, stream):
        self.stream = stream
        self.is_open = trio.Event()
        self.is_open.set()

    def stop(self):
        self.is_open = trio.Event()

    async def send_all(self, data):
        await self.is_open.wait()
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self.is_open.wait()

    async def receive_some(self, max_bytes=None):
        data = await self.stream.receive_some(max_bytes)
        await self.is_open.wait()
        return data

    async def aclose(self):
        await self.stream.aclose()


@pytest.fixture
async def gated(clients):
    """A client, and the connections that it has dialled."""
    gates = []

    async def dial():
        gates.append(Gate(await clients.dial()))
        return gates[-1]

    async with connect("ws://localhost", dial=dial) as client:
        yield client, gates
        for gate in gates:
            gate.is_open.set()


@pytest.mark.parametrize("keep_partial", [False, True])
async def test_a_server_that_stops_in_the_middle_of_an_answer(autojump_clock, gated, clients, keep_partial):
    client, gates = gated
    async with client.open_session() as session:
        before = trio.current_time()
        with pytest.raises(TimedOut) as caught:
            async with session.generate("hello", LONG, timeout=2, keep_partial=keep_partial) as generation:
                await anext(generation)
                gates[0].stop()
                await generation.result()
        assert trio.current_time() == before + 2
        completion = caught.value.completion
        came = f"{len(completion.text)} character{'s' if len(completion.text) > 1 else ''} of the answer"
        assert str(caught.value) == f"timed out after 2 s with {came}, which .completion holds"
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)
        assert reference(clients, [user("hello")], 200, ignore_eos=True).startswith(completion.text)
        history = [user("hello"), assistant(completion.text)] if keep_partial else []
        assert completion.text and session.history == history
        gates[0].is_open.set()
        again = await session.ask("again", GREEDY)
        assert again.text == reference(clients, [*history, user("again")])
        assert generation.completion == completion


async def test_a_server_that_stops_before_the_request(autojump_clock, gated, clients):
    """Each request has its own time; afterwards the server aborts the first, and answers the third."""
    client, gates = gated
    async with client.open_session() as session:
        gates[0].stop()
        for timeout in (2, 3):
            before = trio.current_time()
            with pytest.raises(TimedOut) as caught:
                await session.ask("hello", LONG, timeout=timeout)
            assert trio.current_time() == before + timeout
            assert caught.value.completion.text == ""
            assert str(caught.value) == f"timed out after {timeout} s before any text"
        gates[0].is_open.set()
        assert (await session.ask("again", GREEDY)).text == reference(clients, [user("again")])


async def test_a_server_that_never_answers_again(autojump_clock, gated):
    """The ping finds it."""
    client, gates = gated
    async with client.open_session() as session:
        gates[0].stop()
        with pytest.raises(TimedOut):
            await session.ask("hello", LONG, timeout=2)
        with trio.fail_after(2 * PING_INTERVAL), pytest.raises(ConnectionLost, match="does not answer"):
            await session.ask("again", GREEDY)


async def test_a_call_does_not_wait_for_the_goodbye(autojump_clock, gated):
    client, gates = gated
    before = trio.current_time()

    async def stop():
        await trio.sleep(1)
        gates[0].stop()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        with pytest.raises(TimedOut) as caught:
            await client.generate("hello", max_tokens=400, ignore_eos=True, timeout=2)
        assert trio.current_time() == before + 2
        assert caught.value.completion.text


@pytest.mark.parametrize("keep_partial", [False, True])
async def test_a_history_is_replaced_right_after_a_timeout(autojump_clock, gated, clients, keep_partial):
    client, gates = gated
    async with client.open_session() as session:
        with pytest.raises(TimedOut):
            async with session.generate("hello", LONG, timeout=2, keep_partial=keep_partial) as generation:
                await anext(generation)
                gates[0].stop()
                await generation.result()
        session.replace_history([user("other"), assistant("yes")])
        gates[0].is_open.set()
        for question in ("again", "and again"):
            expected = reference(clients, [*session.history, user(question)])
            assert (await session.ask(question, GREEDY)).text == expected
