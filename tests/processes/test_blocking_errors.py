"""The errors of the blocking calls: short tracebacks, unless a bug is behind them."""

import asyncio
import re
import signal
import traceback
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from helpers.blocking_engines import simulated
from helpers.misuses import awaited, entered_by_async_with, iterated_over_by_async_for

from trioengine import (
    ConnectionLost,
    EngineClosed,
    EngineError,
    ModelError,
    RequestRejected,
    TransitionFailed,
    blocking,
)
from trioengine.testing.simulation import IMAGE_LIMITS


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
    assert inner in (["loop.py"], ["__init__.py"]), inner
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


def missing_file():
    with blocking.Engine(partial(simulated, limits=IMAGE_LIMITS)) as engine:
        engine.open_session().ask("What?", media=["/nowhere/cat.png"])


def other_weights():
    with blocking.Engine(simulated) as engine:
        engine.update_weights("/other")


@pytest.mark.parametrize(
    "call",
    [refused_connection, lambda: blocking.Engine(an_engine_that_cannot_start), missing_file, other_weights],
    ids=["a connection", "a model", "an image", "other weights"],
)
def test_the_reason_in_a_message_is_not_shown_again_as_its_cause(call):
    with pytest.raises((ConnectionLost, ModelError, RequestRejected, TransitionFailed)) as caught:
        blocking.loop.shortens(call)()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "site-packages" not in shown
    assert caught.value.__context__ is None  # IPython shows no cell error where it finds an exception group


def test_a_generation_is_read_once(engine):
    generation = engine.open_session().generate("x", max_tokens=4)
    assert "".join(chunk.text for chunk in generation) == generation.completion.text
    for read_again in (lambda: list(generation), generation.result):
        with pytest.raises(RuntimeError, match="is read once: its `completion` is the answer") as caught:
            read_again()
        assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4


def test_a_bug_behind_an_error_keeps_its_frames(engine):
    async def close_by_a_bug():
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as exc:
            raise EngineClosed("the engine is closed") from exc

    with pytest.raises(EngineClosed) as caught:
        blocking.loop.shortens(engine.loop.call)(close_by_a_bug)
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


@pytest.mark.parametrize("way", [awaited, entered_by_async_with, iterated_over_by_async_for])
def test_the_forms_of_trio_are_answered_by_those_of_blocking_calls(engine, way):
    with engine.open_session() as session:
        generation = session.generate("x")
        for thing, form in [
            (engine, "use `with open_engine(...) as engine`"),
            (session, "use `with engine.open_session() as session`"),
            (generation, "use `for chunk in session.generate(...)`"),
        ]:
            with pytest.raises(TypeError, match=re.escape(form)):
                asyncio.run(way(thing))
        with pytest.raises(TypeError, match="given to `next`: use `for chunk in"):
            next(generation)
        assert "not asked: use `for chunk in session.generate(...)`" in repr(generation)
