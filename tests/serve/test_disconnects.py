"""Disconnects in one table: each kind of request, each way to leave, at each moment ends alike, and at once.

The cases of one protocol are in test_chat_disconnects.py and test_realtime_disconnects.py.
"""

import dataclasses
import logging

import pytest
import trio
from helpers.clients import CHAT, chat, first_token, open_clients
from helpers.frames import HANDSHAKE, read_until
from helpers.kinds import KINDS, ROOM, WEBSOCKETS
from helpers.secured import end_sending
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.types import Cause
from trioengine.testing.simulated_worker import Behaviour

CLOSED = "client disconnected: it closed the connection"
SLOW = "client disconnected: it did not read, send or answer in time"
STEP = 0.2  # seconds


async def leave_at_once(stream):
    """Close both directions, as a reset does."""
    await trio.aclose_forcefully(stream)


LEAVING = [end_sending, leave_at_once]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def ask(kind):
    return KINDS[kind]


@pytest.fixture(params=LEAVING, ids=["cleanly", "at once"])
def leave(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request):
    return request.param


@pytest.fixture
async def clients(autojump_clock, tls):
    async with open_clients(limits=ROOM, tls=tls) as clients:
        yield clients


def only_session(clients):
    (session,) = clients.engine.runtime.sessions
    return session, session.request


async def ended_by_disconnect(clients, *sessions):
    """At once, for this reason, and with nothing left; each is a session with its request."""
    before = trio.current_time()
    for session, generation in sessions:
        await generation.settled.wait()
        await session.released.wait()
    assert trio.current_time() - before < 0.1
    await clients.all_closed()
    for session, generation in sessions:
        assert (generation.outcome.cause, session.end_cause) == (Cause.DISCONNECT, Cause.DISCONNECT)
    assert len(clients.server.in_flight) == 0
    statistics = clients.engine.statistics()
    assert (statistics.finished, statistics.aborted, statistics.failed) == (0, len(sessions), 0)
    await clients.everything_is_given_back()


# ---- the request and its session ----------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "in the middle"])
async def test_the_request_ends(autojump_clock, clients, messages, caplog, kind, ask, leave, begun):
    """Over HTTP the line of the access log comes before that of the disconnect."""
    async with clients.connect() as client:
        await ask(client)
        await (first_token(clients.engine) if begun else wait_all_tasks_blocked())
        sessions = [(session, session.request) for session in clients.engine.runtime.sessions]
        outputs = [generation.output for _, generation in sessions]  # None: a choice waits for the first one's prompt
        assert begun is any(output is not None and output.token_ids for output in outputs)
        await leave(client.stream)
        await ended_by_disconnect(clients, *sessions)
    assert messages() == [CLOSED]
    if kind not in WEBSOCKETS:
        assert [record.name for record in caplog.records[-2:]] == ["trioengine.access", "trioengine"]


async def test_a_reader_that_never_reads(autojump_clock, clients, ask):
    """Its answer is merged, its connection closed after a send that does not move; others are not delayed."""
    timeout = clients.server.config.send_timeout
    async with clients.connect(*lockstep_stream_pair()) as client:
        await ask(client)
        await first_token(clients.engine)
        before = trio.current_time()
        assert (await clients.chat()).status == 200
        assert trio.current_time() - before < 1
        await clients.all_closed()
        assert timeout - 1 < trio.current_time() - before < timeout + 10  # a goodbye has its time, too
    await clients.everything_is_given_back()


async def test_at_any_moment(autojump_clock, ask, leave):
    """After each number of scheduler passes, from the first byte to the answer: everything is given back."""
    async with open_clients(limits=ROOM) as clients:
        for passes in range(120):
            async with clients.connect() as client:
                await ask(client, max_tokens=4)
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                await leave(client.stream)
                await clients.all_closed()
        await clients.everything_is_given_back()
        statistics = clients.engine.statistics()
        assert statistics.aborted > 0
        assert statistics.failed == 0
        assert len(clients.server.in_flight) == 0


# ---- the worker ---------------------------------------------------------------------------------------------------


class Executed:
    """How many steps the worker has run for each request."""

    def __init__(self, worker):
        self.steps = {}
        self._execute, worker.runner.execute = worker.runner.execute, self._watch

    def _watch(self, output):
        for entry in output.scheduled:
            self.steps[entry.sequence.request] = self.steps.get(entry.sequence.request, 0) + 1
        return self._execute(output)


def slow_clients(max_num_seqs, tls):
    config = EngineConfig(model="toy", max_num_seqs=max_num_seqs)
    limits = dataclasses.replace(ROOM, max_num_seqs=max_num_seqs)
    return open_clients(config, limits, [Behaviour(step_time=STEP)], tls=tls)


def held_blocks(clients):
    engine_core = clients.simulation.worker.core
    statistics = engine_core.statistics()
    return engine_core.limits.kv_blocks_total - statistics.kv_blocks_free - statistics.kv_blocks_cached


@pytest.mark.parametrize("after", [0.5, 1.05, 1.15, 5.0])
async def test_its_blocks_are_free_within_a_step(autojump_clock, tls, ask, leave, after):
    """From the moment at which the server detects the disconnect, which is at once."""
    async with slow_clients(8, tls) as clients:
        executed = Executed(clients.simulation.worker)
        async with clients.connect() as client:
            await ask(client)
            await trio.sleep(after)
            assert held_blocks(clients) > 0
            before = dict(executed.steps)
            await leave(client.stream)
            await trio.sleep(STEP + 0.05)
            assert held_blocks(clients) == 0
            assert all(steps - before.get(request, 0) in (0, 1) for request, steps in executed.steps.items())


async def test_its_queued_request_never_runs(autojump_clock, tls, ask, leave):
    async with slow_clients(1, tls) as clients:
        executed = Executed(clients.simulation.worker)
        async with clients.connect() as busy, clients.connect() as client:
            await busy.send("POST", CHAT, chat(max_tokens=50))
            await first_token(clients.engine)
            await ask(client)
            await wait_all_tasks_blocked()
            assert clients.engine.statistics().running == 1
            assert 0 < clients.engine.statistics().waiting < len(list(clients.engine.runtime.sessions))
            await leave(client.stream)
            await trio.sleep(STEP + 0.05)
            assert (clients.engine.statistics().running, clients.engine.statistics().waiting) == (1, 0)
            assert (await busy.answer()).json["usage"]["completion_tokens"] == 50
        assert len(executed.steps) == 1


# ---- the line of the log ------------------------------------------------------------------------------------------


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "trioengine")
    caplog.clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "trioengine" and not record.getMessage().startswith("ready")
    ]


@pytest.mark.parametrize("how", ["close frame", "reset"])
async def test_an_idle_websocket_is_logged(autojump_clock, clients, messages, how):
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    if how == "close frame":
        await stream.send_all(b"\x88\x80\0\0\0\0")
    await stream.aclose()
    await clients.all_closed()
    assert messages() == [CLOSED]


@pytest.mark.parametrize("what", ["no ping is answered", "the head does not come"])
async def test_a_slow_client_is_logged(autojump_clock, clients, messages, what):
    stream = clients.stream()
    if what == "the head does not come":
        await stream.send_all(b"GET /")
    else:
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
    await clients.all_closed()
    assert messages() == [SLOW]
    await trio.aclose_forcefully(stream)


async def test_broken_frames_are_logged_without_their_bytes(autojump_clock, clients, messages):
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(b"\xff\xff")
    await stream.aclose()
    await clients.all_closed()
    (message,) = messages()
    assert message.startswith("client disconnected: it ")
