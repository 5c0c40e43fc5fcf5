"""The blocking calls: trio in a thread of its own, on a simulated worker and on the real one."""

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from trioengine import Client as AsyncClient
from trioengine import (
    ConnectionLost,
    EngineClosed,
    EngineConfig,
    EngineError,
    ModelError,
    RequestRejected,
    TimedOut,
    WorkerLost,
    blocking,
)
from trioengine import Engine as AsyncEngine
from trioengine import Session as AsyncSession
from trioengine.serve import ServeConfig, serve
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour

STEP = 0.001  # seconds: the clock is real here


@asynccontextmanager
async def simulated(config=None, **options):
    async with simulated_engine(config, behaviours=[Behaviour(step_time=STEP)], **options) as (engine, _):
        yield engine


@pytest.fixture
def engine():
    with blocking.Engine(simulated) as engine:
        yield engine
        engine.loop.call(everything_is_given_back, engine.loop.resource)
    assert not engine.loop._thread.is_alive()


async def everything_is_given_back(engine):
    gc.collect()
    with trio.fail_after(20):
        while engine.statistics().sessions:
            await engine.gate.changed()
    await engine.check_invariants()


async def somebody_waits(line):
    with trio.fail_after(20):
        while not len(line):
            await trio.lowlevel.checkpoint()


def interrupted(generation, after=1):
    """Read so many chunks; then comes Ctrl-C."""
    chunks = []
    with pytest.raises(KeyboardInterrupt):
        for chunk in generation:
            chunks.append(chunk)
            if len(chunks) == after:
                signal.raise_signal(signal.SIGINT)
    return chunks


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def interruptible():
    """SIGINT interrupts, also where the tests were started in the background, where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_conversation(engine):
    with engine.open_session(label="mine") as session:
        generation = session.generate("hello", max_tokens=20, ignore_eos=True)
        text = "".join(chunk.text for chunk in generation)
        assert text == generation.completion.text != ""
        completion = session.ask("more", max_tokens=5, ignore_eos=True)
        assert [message["content"] for message in session.history] == ["hello", text, "more", completion.text]
        session.replace_history([])
        assert session.history == []
        assert "mine" in repr(session)
        assert "length" in repr(generation)


def test_one_shots_and_the_engine(engine):
    assert engine.generate("hello", max_tokens=3, ignore_eos=True).finish_reason == "length"
    assert engine.state == "awake"
    assert engine.statistics().finished == 1
    engine.sleep()
    assert engine.state == "asleep"
    engine.wake("kv_cache")
    engine.wake()
    engine.update_weights("toy")
    assert "awake" in repr(engine)


def test_errors_are_those_of_the_engine(engine):
    session = engine.open_session()
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        session.generate("hello", max_token=3)
    with pytest.raises(RequestRejected, match="prompt is empty"):
        session.ask("")
    with pytest.raises(TimedOut) as caught:
        session.ask("hello", max_tokens=400, ignore_eos=True, timeout=0.05)
    assert caught.value.completion.cause == "timeout"
    generation = session.generate("hello", max_tokens=3, ignore_eos=True)
    assert generation.result().text
    with pytest.raises(RuntimeError, match="entered once"):
        generation.result()


def iterated(session):
    for _ in session.generate("x", max_tokens=400, ignore_eos=True, timeout=0.01):
        pass


FAILURES = {  # each gives a call that fails
    "a refused prompt": lambda engine: lambda: engine.open_session().ask(""),
    "a refused prompt, streamed": lambda engine: lambda: list(engine.open_session().generate("")),
    "a timeout": lambda engine: lambda: engine.generate("x", max_tokens=400, ignore_eos=True, timeout=0.01),
    "a timeout of a stream": lambda engine: partial(iterated, engine.open_session()),
    "a timeout in line": lambda engine: engine.sleep() or (lambda: engine.generate("x", wait=True, timeout=0.01)),
    "a sleep": lambda engine: engine.sleep() or (lambda: engine.generate("x")),
    "an unknown argument": lambda engine: lambda: engine.generate("x", max_token=3),
    "an unknown argument of a session": lambda engine: lambda: engine.open_session(labl="x"),
    "a bad history": lambda engine: lambda: engine.open_session(history=3),
    "a bad mode": lambda engine: lambda: engine.sleep(mode="now"),
    "a close": lambda engine: engine.close() or (lambda: engine.open_session()),
}


@pytest.mark.parametrize("way", FAILURES)
def test_a_traceback_shows_the_call_and_not_the_loop(way):
    with blocking.Engine(simulated) as engine:
        call = FAILURES[way](engine)
        with pytest.raises(EngineError) as caught:
            call()
    frames = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    inner = [path.name for path in frames if path != Path(__file__)]
    assert inner in (["border.py"], ["engine.py"]), inner
    shown = "".join(traceback.format_exception(caught.value))
    assert "During handling" not in shown
    assert "trio/_core" not in shown


async def no_network():
    try:
        raise OSError("no network") from ExceptionGroup("all attempts failed", [ConnectionRefusedError(111, "refused")])
    except OSError as exc:
        raise ModelError("org/model cannot be fetched from the hub: no network") from exc


@asynccontextmanager
async def an_engine_that_cannot_start():
    await no_network()
    yield


def refused_connection():
    blocking.connect("http://127.0.0.1:1").generate("x")  # nothing listens there


@pytest.mark.parametrize("call", [refused_connection, lambda: blocking.Engine(an_engine_that_cannot_start)])
def test_the_reason_in_a_message_is_not_shown_again_as_its_cause(call):
    with pytest.raises((ConnectionLost, ModelError)) as caught:
        blocking.border.shortens(call)()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "site-packages" not in shown


def test_a_bug_behind_an_error_keeps_its_frames(engine):
    async def close_by_a_bug():
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as exc:
            raise EngineClosed("the engine is closed") from exc

    with pytest.raises(EngineClosed) as caught:
        blocking.border.shortens(engine.loop.call)(close_by_a_bug)
    assert "in close_by_a_bug" in "".join(traceback.format_exception(caught.value))


def test_an_interrupt_has_a_short_traceback(engine):
    with pytest.raises(KeyboardInterrupt) as caught:
        for _ in engine.open_session().generate("one", max_tokens=400, ignore_eos=True):
            signal.raise_signal(signal.SIGINT)
    assert all(frame.filename == __file__ for frame in traceback.extract_tb(caught.value.__traceback__))


def test_the_whole_traceback_is_logged_for_debugging(engine, caplog):
    with engine.open_session() as session, caplog.at_level("DEBUG", "trioengine"), pytest.raises(RequestRejected):
        session.ask("")
    (record,) = [record for record in caplog.records if "traceback" in record.message]
    frames = [frame.name for frame in traceback.extract_tb(record.exc_info[2])]
    assert record.message == "the whole traceback of RequestRejected"
    assert frames[-1] == "prepare"


def test_a_bug_keeps_its_frames(engine):
    def crash():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        engine.loop.call_sync(crash)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "crash"


def test_requests_are_ended_by_their_label(engine):
    session = engine.open_session()
    generation = session.generate("one", max_tokens=400, ignore_eos=True, label="mine")
    for _ in generation:
        assert engine.abort("mine") in (0, 1)
    assert generation.completion.cause == "client"
    assert engine.abort("mine") == engine.abort_all() == 0


def test_it_takes_what_the_engine_takes():
    """Under the same names, with the same defaults."""
    for ours, theirs in [
        (blocking.Engine.open_session, AsyncEngine.open_session),
        (blocking.Engine.generate, AsyncEngine.generate),
        (blocking.Engine.sleep, AsyncEngine.sleep),
        (blocking.Engine.wake, AsyncEngine.wake),
        (blocking.Engine.update_weights, AsyncEngine.update_weights),
        (blocking.Engine.abort, AsyncEngine.abort),
        (blocking.Engine.abort_all, AsyncEngine.abort_all),
        (blocking.Client.open_session, AsyncClient.open_session),
        (blocking.Client.generate, AsyncClient.generate),
        (blocking.Client.abort, AsyncClient.abort),
        (blocking.Session.generate, AsyncSession.generate),
        (blocking.Session.ask, AsyncSession.ask),
    ]:
        ours, theirs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
        assert [(each.name, each.kind, each.default) for each in ours.values()] == [
            (each.name, each.kind, each.default) for each in theirs.values()
        ]


def test_in_a_running_asyncio_loop(engine):
    """As in the cell of a notebook."""

    async def cell():
        return [chunk.text for chunk in engine.open_session().generate("hello", max_tokens=5, ignore_eos=True)]

    assert "".join(asyncio.run(cell())) == engine.generate("hello", max_tokens=5, ignore_eos=True).text


def test_from_several_threads(engine):
    texts = []
    ask = partial(engine.generate, "hello", max_tokens=5, ignore_eos=True)
    threads = [threading.Thread(target=lambda: texts.append(ask().text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert len(set(texts)) == 1


def test_a_server_elsewhere():
    ready, over = threading.Event(), threading.Event()
    ports = []

    async def main():
        async with trio.open_nursery() as nursery:
            simulation = Simulation(nursery)
            run = partial(serve, EngineConfig(model="toy"), ServeConfig(port=0), ports=simulation.ports)
            server = await nursery.start(run)
            await server.engine.ready()
            ports.append(server.port)
            ready.set()
            await trio.to_thread.run_sync(over.wait)
            server.abort()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert ready.wait(60)
    try:
        with blocking.connect(f"http://127.0.0.1:{ports[0]}") as client, client.open_session() as session:
            assert session.ask("hello", max_tokens=5, ignore_eos=True).text
            assert len(session.history) == 2
            assert client.generate("hello", max_tokens=5, ignore_eos=True).text
    finally:
        over.set()
        thread.join()


# ---- leaving ------------------------------------------------------------------------------------------------------


def test_an_interrupt_stops_the_answer_and_leaves_the_conversation_usable(engine):
    session = engine.open_session()
    interrupted(session.generate("one", max_tokens=400, ignore_eos=True))
    assert session.history == []
    interrupted(session.generate("two", max_tokens=400, ignore_eos=True, keep_partial=True), after=3)
    assert len(session.history) == 2
    assert session.ask("three", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    assert engine.statistics().aborted == 2


def test_an_interrupt_while_nothing_comes(engine):
    """The caller waits for a chunk in that moment."""
    session = engine.open_session()
    engine.sleep()
    chunks = iter(session.generate("one", wait=True))
    pid, told = os.getpid(), threading.Event()

    def interrupt():
        told.wait()
        engine.loop.call(somebody_waits, engine.loop.resource.gate.requests)
        os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        told.set()
        next(chunks)
    thread.join()
    engine.wake()
    assert session.ask("two", max_tokens=3, ignore_eos=True).text


def test_break_stops_the_answer(engine):
    session = engine.open_session()
    for _ in session.generate("one", max_tokens=400, ignore_eos=True):
        break
    assert session.history == []
    assert session.ask("two", max_tokens=3, ignore_eos=True).text
    assert engine.statistics().aborted == 1


def test_an_answer_is_aborted_from_another_thread(engine):
    session = engine.open_session()
    generation = session.generate("one", max_tokens=400, ignore_eos=True)
    for _ in generation:
        generation.abort()
    assert generation.completion.cause == "client"


def test_a_session_that_is_not_referenced_ends(engine):
    for chunk in engine.open_session().generate("one", max_tokens=3, ignore_eos=True):
        assert chunk.text
    engine.loop.call(everything_is_given_back, engine.loop.resource)


def test_an_engine_that_is_closed_refuses():
    engine = blocking.Engine(simulated)
    session = engine.open_session()
    generation = session.generate("one")
    engine.close()
    engine.close()
    for call in (lambda: session.ask("one"), lambda: engine.generate("one"), generation.result, engine.open_session):
        with pytest.raises(EngineClosed):
            call()
    session.close()


def test_closing_ends_a_call_in_another_thread():
    engine = blocking.Engine(simulated)
    engine.sleep()
    ended = []

    def ask():
        try:
            engine.generate("one", wait=True)
        except EngineClosed as exc:
            ended.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    engine.loop.call(somebody_waits, engine.loop.resource.gate.sessions)
    engine.close()
    thread.join()
    assert len(ended) == 1


def test_an_engine_that_is_not_referenced_is_closed():
    engine = blocking.Engine(simulated)
    thread = engine.loop._thread
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_an_engine_that_cannot_start():
    before = set(threading.enumerate())
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        blocking.open_engine("toy", max_model_length=3)
    with pytest.raises(ModelError, match="no-such-model"):
        blocking.open_engine("/no-such-model.gguf")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert "trioengine" not in left  # trio keeps idle threads of its own for a while


def test_an_engine_whose_worker_cannot_be_kept():
    """Calls raise the failure that ended it."""

    @asynccontextmanager
    async def failing():
        config = EngineConfig(model="toy", max_restarts=1, restart_delays=[0])
        async with simulated_engine(config, behaviours=[Behaviour()]) as (engine, simulation):
            engine.simulation = simulation
            yield engine

    failed = blocking.Engine(failing)
    simulation = failed.loop.resource.simulation

    def break_it():
        simulation.failing_starts = 100
        simulation.worker.kill()

    failed.loop.call_sync(break_it)
    with pytest.raises(WorkerLost):
        failed.generate("one", wait=True)
    failed.close()


def test_a_call_between_the_failure_and_the_end_of_the_loop(engine):
    async def refused():
        raise EngineClosed("the engine is closed") from WorkerLost("the worker died ten times")

    with pytest.raises(WorkerLost, match="ten times"):
        engine.loop.call(refused)


# ---- the real worker ----------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from pathlib import Path
from trioengine import blocking

engine = blocking.open_engine(sys.argv[1], kv_cache_memory=64 << 20, max_model_len=512)
session = engine.open_session()
for chunk in session.generate("Count to ten.", max_tokens=200, ignore_eos=True):
    break
print(engine.statistics().worker_pid)
"""


def test_a_program_that_closes_nothing_leaves_no_worker(smollm2):
    command = [sys.executable, "-c", PROGRAM, str(smollm2)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not Path(f"/proc/{int(ended.stdout)}").exists()


def test_an_interrupt_of_the_real_worker(smollm2):
    with blocking.open_engine(str(smollm2), kv_cache_memory=64 << 20, max_model_len=512) as engine:
        session = engine.open_session()
        interrupted(session.generate("Count to ten.", max_tokens=300, temperature=0, ignore_eos=True), after=3)
        assert "Paris" in session.ask("What is the capital of France?", max_tokens=16, temperature=0).text
        session.close()
        engine.loop.call(everything_is_given_back, engine.loop.resource)
