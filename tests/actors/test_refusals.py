"""What is refused, or fails, alone: bad prompts, second users, no slot left, a bug in one session."""

import itertools

import pytest
import trio
from helpers.expectations import GREEDY, LONG, generated, reference
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineConfig,
    EngineError,
    EngineOverloaded,
    RequestRejected,
    SamplingFailed,
    TimedOut,
)
from trioengine.actors.attachment import WorkerAttachment
from trioengine.actors.session_actor import SessionActor
from trioengine.core.codec import encode
from trioengine.core.messages import AddMessage
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([1, -1], "invalid_value"),
        ([1, 259], "invalid_value"),
        ([1] * 512, "context_length_exceeded"),
    ],
)
async def test_a_bad_prompt_of_token_ids_is_refused_alone(autojump_clock, simulated, prompt, code):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(RequestRejected) as caught:
            async with session.generate(prompt, GREEDY):
                pass
        assert caught.value.code == code
        assert session.history == []
        async with session.generate([1], GREEDY) as generation:
            await generation.result()


async def test_one_request_fails_alone(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            simulation.worker.runner.fail_requests.add(generation.request_id)
            with pytest.raises(SamplingFailed, match="failed on request"):
                await generation.result()
            with pytest.raises(SamplingFailed, match="failed on request"):
                _ = generation.completion
        assert session.history == []
        async with session.generate("two", GREEDY) as generation:
            await generation.result()
    assert engine.statistics().failed == 1


async def test_a_request_is_encoded_once(autojump_clock, simulated, monkeypatch):
    engine, _ = simulated
    encoded = []

    def count(message):
        encoded.append(type(message))
        return encode(message)

    monkeypatch.setattr("trioengine.core.connection.encode", count)
    await engine.generate("x", GREEDY)
    assert encoded.count(AddMessage) == 1


async def test_sessions_have_a_limit(autojump_clock):
    config = EngineConfig(model="toy", max_sessions=2)
    async with simulated_engine(config) as (engine, _), engine.open_session(), engine.open_session() as second:
        with pytest.raises(EngineOverloaded) as caught:
            async with engine.open_session(wait=False):
                pass
        assert caught.value.code == "sessions"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_later, second)
            async with engine.open_session(wait=True):
                nursery.cancel_scope.cancel()


async def end_later(session):
    await trio.sleep(1)
    session.end()


async def test_requests_have_a_limit(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=1, max_num_batched_tokens=64)
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, "one", LONG)
        nursery.start_soon(engine.generate, "two", LONG)
        await wait_all_tasks_blocked()
        with pytest.raises(EngineOverloaded) as caught:
            await engine.generate("three", GREEDY, wait=False)
        assert caught.value.code == "queue"
        with pytest.raises(TimedOut):
            await engine.generate("three", GREEDY, wait=True, timeout=0.5)
        completion = await engine.generate("three", GREEDY, wait=True)
        assert list(completion.token_ids) == reference(engine, "three")


async def test_a_crash_in_one_session_ends_it_alone(autojump_clock, simulated, caplog):
    engine, _ = simulated
    async with engine.open_session() as broken, engine.open_session() as whole:
        async with broken.generate("one", LONG) as one, whole.generate("two", GREEDY) as two:
            one._state.output = None  # a bug: the next row cannot be taken in
            with pytest.raises(Exception, match="the session crashed"):
                await one.result()
            assert list((await two.result()).token_ids) == reference(engine, "two")
        assert broken.end_cause is Cause.ERROR
    assert "crashed" in caplog.text


def raising_once(method):
    """Return a method whose first call has a bug."""
    calls = itertools.count()

    def mutant(self):
        if next(calls) == 0:
            raise RuntimeError("a bug in one session")
        method(self)

    return mutant


async def test_a_crash_while_a_session_is_taken_off_the_worker_ends_it_alone(autojump_clock, simulated, monkeypatch):
    engine, _ = simulated
    async with engine.open_session() as broken, engine.open_session() as whole:
        async with broken.generate("one", LONG) as one, whole.generate("two", LONG) as two:
            await anext(one)
            monkeypatch.setattr(SessionActor, "_suspend", raising_once(SessionActor._suspend))
            await engine.sleep(mode="keep")
            await engine.wake()
            with pytest.raises(Exception, match="the session crashed"):
                await one.result()
            assert list((await two.result()).token_ids) == reference(engine, "two", LONG)
        assert broken.end_cause is Cause.ERROR


async def test_a_crash_at_the_end_of_a_probe_does_not_stop_the_others(autojump_clock, monkeypatch):
    async with simulated_engine() as (engine, simulation):
        recovery = engine.runtime.recovery
        outcomes = []

        async def ask(prompt):
            try:
                outcomes.append((await engine.generate(prompt, LONG)).finish_reason.value)
            except EngineError as exc:
                outcomes.append(str(exc))

        async with trio.open_nursery() as nursery:
            for prompt in ("one", "two", "three"):
                nursery.start_soon(ask, prompt)
            await generated(engine, 3)
            for _ in range(2):  # the second time before a request got a token: all are suspects
                simulation.worker.kill()
                while engine.runtime.gate.link is not None:
                    await engine.runtime.gate.changed()
                while engine.runtime.gate.link is None:
                    await engine.runtime.gate.changed()
            assert recovery.probed is not None
            monkeypatch.setattr(WorkerAttachment, "drop", raising_once(WorkerAttachment.drop))
        assert sorted(map(str, outcomes)) == [
            "length",
            "length",
            "the session crashed: RuntimeError: a bug in one session",
        ]
