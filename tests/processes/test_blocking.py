"""The blocking calls: trio in a thread of its own, on a simulated worker and on the real one."""

import asyncio
import inspect
import os
import signal
import threading
from functools import partial

import pytest
import trio
from helpers.blocking_engines import everything_is_given_back, interrupted, somebody_waits

from trioengine import Client as AsyncClient
from trioengine import Engine as AsyncEngine
from trioengine import EngineConfig, RequestRejected, TimedOut, blocking
from trioengine import Session as AsyncSession
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation

# ---- answers ------------------------------------------------------------------------------------------------------


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
    with pytest.raises(RuntimeError, match="read once"):
        generation.result()


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
        engine.loop.call(somebody_waits, engine.loop.resource.runtime.gate.requests)
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


# ---- the real worker ----------------------------------------------------------------------------------------------


def test_an_interrupt_of_the_real_worker(smollm2):
    with blocking.open_engine(str(smollm2), kv_cache_memory=64 << 20, max_model_len=512) as engine:
        session = engine.open_session()
        interrupted(session.generate("Count to ten.", max_tokens=300, temperature=0, ignore_eos=True), after=3)
        assert "Paris" in session.ask("Name the capital of France.", max_tokens=16, temperature=0).text
        session.close()
        engine.loop.call(everything_is_given_back, engine.loop.resource)
