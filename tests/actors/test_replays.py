"""The worker dies, and the streams go on with the next one as if nothing had happened; a poisoned one goes alone."""

from contextlib import nullcontext

import pytest
import trio
from helpers.expectations import GREEDY, everything_is_given_back, generated, reference, until
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, SamplingParams, TimedOut, TransitionFailed, WorkerLost
from trioengine.core.lifecycle import Power
from trioengine.core.messages import AddMessage
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine, toy_answer
from trioengine.testing.toy_model import toy_logprobs

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
NAMES = ["one", "two", "three", "four", "five", "six"]


async def ask_all(engine, simulation, prompts, victim, num_tokens=0):
    """All at once, and one kills each worker after so many tokens of its: completions, or why there is none."""
    completions = {}

    async def ask(prompt):
        async with engine.open_session() as session, session.generate(prompt, LONG) as generation:
            if prompt == prompts[victim]:
                simulation.poisoned[generation.request_id] = num_tokens
            try:
                completions[prompt] = await generation.result()
            except WorkerLost as exc:
                completions[prompt] = exc

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(ask, prompt)
    return completions


@pytest.mark.parametrize("deaths", [1, 2, 3])
async def test_streams_go_on(autojump_clock, simulated, deaths):
    engine, simulation = simulated
    completions = {}

    async def ask(prompt):
        completions[prompt] = await engine.generate(prompt, LONG)

    async with trio.open_nursery() as nursery:
        for prompt in NAMES:
            nursery.start_soon(ask, prompt)
        for death in range(1, deaths + 1):
            await generated(engine, 40 * death)
            simulation.worker.kill()
            while engine.state is Power.AWAKE:
                await engine.runtime.gate.changed()
            assert engine.statistics().suspended > 0
    for prompt, completion in completions.items():
        assert list(completion.token_ids) == reference(engine, prompt, LONG)
        assert (completion.finish_reason, completion.resumed) == (FinishReason.LENGTH, deaths)
        assert completion.usage.completion_tokens == 60
    assert engine.statistics().failed == 0
    await everything_is_given_back(engine, simulation)


async def test_what_was_asked_for_goes_on_as_if_nothing_had_happened(autojump_clock, simulated):
    """Stop strings across the death, logprobs, min_tokens, and the usage."""
    engine, simulation = simulated
    prompt, params = [72, 105], SamplingParams(max_tokens=50, min_tokens=30, logprobs=2)
    expected = await engine.generate(prompt, params)
    text = (await engine.generate(prompt, LONG)).text
    async with engine.open_session() as session:
        async with session.generate(prompt, params) as generation:
            chunk = await anext(generation)
            simulation.worker.kill()
            logprobs = [*chunk.logprobs, *[entry async for chunk in generation for entry in chunk.logprobs]]
            completion = generation.completion
        assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
        assert logprobs == list(completion.logprobs) == [toy_logprobs(id, 2) for id in completion.token_ids]
        assert (completion.usage.prompt_tokens, completion.resumed) == (2, 1)
    async with engine.open_session() as session:
        stop = text[10:13]
        async with session.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True, stop=stop)) as generation:
            await until(engine, lambda: generation._state.num_tokens == text.index(stop) + 2)
            simulation.worker.kill()
            completion = await generation.result()
            assert (completion.finish_reason, completion.text) == (FinishReason.STOP, text[: text.index(stop)])


async def test_the_session_goes_on_after_a_replay(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            await anext(generation)
            simulation.worker.kill()
            await generation.result()
        async with session.generate("two", GREEDY) as generation:
            second = await generation.result()
        messages = [*session.history[:2], {"role": "user", "content": "two"}]
        assert list(second.token_ids) == toy_answer(engine.tokenizer.apply_chat_template(messages), 40)
        assert second.usage.cached_tokens > 0


async def test_three_times_and_no_more(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        for death in range(1, 5):
            await generated(engine, 5 * death)
            simulation.worker.kill()
            while engine.state is Power.AWAKE:
                await engine.runtime.gate.changed()
        with pytest.raises(WorkerLost):
            await generation.result()
    assert engine.statistics().failed == 1
    await engine.generate("two", GREEDY, wait=True)


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
@pytest.mark.parametrize("victim", [0, 3, 5])
async def test_a_request_that_kills_the_worker_goes_alone(autojump_clock, victim, num_tokens):
    """Whether the others got a token before it or not; they lose no attempt, and the deaths do not end the engine."""
    config = EngineConfig(model="toy", max_num_seqs=8, max_restarts=3)
    async with simulated_engine(config) as (engine, simulation):
        completions = await ask_all(engine, simulation, NAMES, victim, num_tokens)
        assert isinstance(completions.pop(NAMES[victim]), WorkerLost)
        for prompt, completion in completions.items():
            assert list(completion.token_ids) == reference(engine, prompt, LONG)
        assert engine.statistics().incarnation == 5  # together, together, alone, alone
        await everything_is_given_back(engine, simulation)


async def test_suspects_are_tried_one_at_a_time_in_order(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8)
    async with simulated_engine(config) as (engine, simulation):
        completions = await ask_all(engine, simulation, NAMES, victim=2)
        resumed = [completions[name].resumed for name in NAMES if name != NAMES[2]]
        assert resumed == [2] * 5  # after the deaths of all; the others were not there at the victim's own
        first_tried = simulation.workers[2].received
        requests = [message.request for message in first_tried if isinstance(message, AddMessage)]
        assert requests == sorted(requests)
        await engine.generate("five", GREEDY)


async def test_killed_again_before_it_is_ready(autojump_clock, simulated):
    """No request was at that worker: nobody is a suspect."""
    engine, simulation = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        await anext(generation)
        simulation.worker.kill()
        await wait_all_tasks_blocked()  # the next one loads
        assert len(simulation.workers) == 2
        simulation.worker.kill()
        completion = await generation.result()
        assert list(completion.token_ids) == reference(engine, "one", LONG)
        assert completion.resumed == 1


@pytest.mark.parametrize("what", ["stop", "end", "timeout", "close"])
async def test_a_request_ends_while_it_waits_for_a_worker(autojump_clock, what):
    async with simulated_engine() as (engine, simulation):
        simulation.stalled_starts = 1
        timeout = 5.0 if what == "timeout" else None
        async with engine.open_session() as session, session.generate("one", LONG, timeout=timeout) as generation:
            await anext(generation)
            simulation.worker.kill()
            while engine.state is not Power.RESTARTING:
                await engine.runtime.gate.changed()
            match what:
                case "stop":
                    generation.abort()
                case "end":
                    session.end()
                case "close":
                    engine.close()
            with pytest.raises(TimedOut) if what == "timeout" else nullcontext():
                await generation.result()
            assert generation.completion.cause is {"timeout": Cause.TIMEOUT, "close": Cause.SHUTDOWN}.get(
                what, Cause.CLIENT
            )


async def test_a_drain_waits_for_replays(autojump_clock):
    async with simulated_engine() as (engine, simulation), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            simulation.worker.kill()
            assert await engine.drain()
            assert list((await generation.result()).token_ids) == reference(engine, "one", LONG)


async def test_no_worker_comes(autojump_clock):
    """The engine gives up: what waited for a worker is told so."""
    config = EngineConfig(model="toy", max_restarts=2, restart_delays=(0.0,))
    failures = []
    with pytest.raises(WorkerLost, match="died 2 times"):
        async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:

            async def ask():
                async with engine.open_session() as session, session.generate("one", LONG) as generation:
                    try:
                        await generation.result()
                    finally:
                        failures.append(generation.outcome)

            nursery.start_soon(ask)
            await generated(engine, 3)
            simulation.failing_starts = 5
            simulation.worker.kill()
    assert isinstance(failures[0].error, WorkerLost)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_refused_update_leaves_a_trial_as_it_is(autojump_clock, mode, count):
    """Nobody runs beside the suspect, and nobody is admitted."""
    async with simulated_engine() as (engine, simulation):
        async with trio.open_nursery() as nursery:
            for prompt in NAMES[:count]:
                nursery.start_soon(engine.generate, prompt, LONG)
            await generated(engine, count)
            for _ in range(2):  # the second time before anybody got a token: all are suspects
                simulation.worker.kill()
                while engine.runtime.gate.link is not None:
                    await engine.runtime.gate.changed()
                while engine.runtime.gate.link is None:
                    await engine.runtime.gate.changed()
            assert engine.runtime.recovery.has_suspects
            with pytest.raises(TransitionFailed, match="another architecture"):
                await engine.update_weights("other", mode=mode)
            assert engine.state is Power.RESTARTING
        await engine.generate("again", GREEDY, wait=True)
        await everything_is_given_back(engine, simulation)
