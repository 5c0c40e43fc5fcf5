"""Embeddings through the engine: in the order of the inputs, the same whatever happens, and nothing is left behind."""

import math
from dataclasses import replace

import pytest
import trio
import trio.testing
from helpers.expectations import everything_is_given_back, until

from trioengine import (
    EngineClosed,
    EngineConfig,
    EngineOverloaded,
    RequestRejected,
    SamplingFailed,
    SessionEnded,
    TimedOut,
)
from trioengine.core.embedding import MAX_INPUTS, vector_of
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import DEFAULT_LIMITS
from trioengine.testing.toy_model import TOY_EMBEDDING_SIZE, toy_embedding

LIMITS = replace(DEFAULT_LIMITS, embeds=True)
LONG = [97 + number % 26 for number in range(300)]


@pytest.fixture
async def simulated(autojump_clock):
    async with simulated_engine(limits=LIMITS) as (engine, simulation):
        yield engine, simulation
        await everything_is_given_back(engine, simulation)


def expected(*prompts, weights=0):
    ids = [prompt.encode() if isinstance(prompt, str) else prompt for prompt in prompts]
    return tuple(vector_of(toy_embedding(each, weights)) for each in ids)


@pytest.mark.parametrize(
    ("inputs", "each"),
    [
        ("to be", ["to be"]),
        ([116, 111], [[116, 111]]),
        (["to be", "or not", "to be"], ["to be", "or not", "to be"]),
        (["to be", [5, 6], "é"], ["to be", [5, 6], "é"]),
        ([LONG] * 3, [LONG] * 3),
        ([[number] for number in range(200)], [[number] for number in range(200)]),
        (LONG * 1 + LONG[: 512 - 300], [LONG + LONG[:212]]),  # it fills the context
    ],
)
async def test_inputs_of_every_kind(autojump_clock, simulated, inputs, each):
    engine, _ = simulated
    embeddings = await engine.embed(inputs)
    assert embeddings.vectors == expected(*each)
    assert embeddings.usage.prompt_tokens == sum(len(one.encode() if isinstance(one, str) else one) for one in each)
    assert embeddings.usage.completion_tokens == 0


async def test_dimensions(autojump_clock, simulated):
    engine, _ = simulated
    ((whole,), (short,), (one,), (all_,)) = [
        (await engine.embed("a", dimensions=dimensions)).vectors for dimensions in (None, 3, 1, TOY_EMBEDDING_SIZE)
    ]
    assert all_ == whole and len(short) == 3 and abs(one[0]) == 1.0
    length = math.hypot(*whole[:3])
    assert short.tolist() == pytest.approx([number / length for number in whole[:3]], abs=1e-6)
    for wrong in (0, TOY_EMBEDDING_SIZE + 1, "3", True):
        with pytest.raises(RequestRejected, match="dimensions must be an integer from 1 to 8, got"):
            await engine.embed("a", dimensions=wrong)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("", "inputs is empty"),
        ([], "inputs must have 1 to 2048 entries, got 0"),
        (["a", ""], r"inputs\[1\] is empty"),
        (["a", []], r"inputs\[1\] is empty"),
        (["a", [97] * 513], r"inputs\[1\]: at least 513 tokens, the context is 512"),
        ("a" * 600, "inputs: 600 tokens are too many for a context of 512"),
        ([[1], [5, 300]], r"inputs\[1\] must hold token ids from 0 to 258, got 300"),
        ([5, "a"], r"inputs must hold token ids from 0 to 258, got 'a'"),
        ([5, True], "inputs must hold token ids from 0 to 258, got True"),
        ("half \ud800", "inputs is not valid Unicode"),
        (b"bytes", "inputs must be a text, token ids, or a list of these, got bytes"),
        (7, "inputs must be a text, token ids, or a list of these, got int"),
        (["a"] * (MAX_INPUTS + 1), "inputs must have 1 to 2048 entries, got 2049"),
        (["a", 7], r"inputs\[1\] must be a string"),
    ],
)
async def test_bad_inputs(autojump_clock, simulated, inputs, message):
    engine, _ = simulated
    with pytest.raises(RequestRejected, match=message):
        await engine.embed(inputs)
    assert engine.statistics().received == 0


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.03])
async def test_a_death_changes_nothing(autojump_clock, simulated, seconds):
    engine, simulation = simulated
    inputs = [LONG[number:] for number in range(20)]
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def kill():
            await trio.sleep(seconds)
            simulation.worker.kill()

        embeddings = await engine.embed(inputs)
    assert embeddings.vectors == expected(*inputs)
    assert len(simulation.workers) == 2


async def test_a_death_while_inputs_wait_for_slots(autojump_clock):
    async with simulated_engine(EngineConfig(model="toy", max_sessions=20), limits=LIMITS) as (engine, simulation):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def kill():
                await until(engine, lambda: engine.statistics().finished)
                simulation.worker.kill()

            embeddings = await engine.embed([LONG] * 100)
        assert embeddings.vectors == expected(*[LONG] * 100)
        assert len(simulation.workers) == 2
        await everything_is_given_back(engine, simulation)


async def test_a_drain_refuses_inputs_that_wait_for_slots(autojump_clock):
    async with simulated_engine(EngineConfig(model="toy", max_sessions=20), limits=LIMITS) as (engine, _):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def drain():
                await until(engine, lambda: engine.statistics().finished)
                await engine.drain()

            with pytest.raises(EngineClosed, match="draining"):
                await engine.embed([LONG] * 100)


async def test_a_sleep_that_keeps_requests(autojump_clock, simulated):
    engine, _ = simulated
    found = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def embed():
            found.extend((await engine.embed([LONG] * 8, wait=True)).vectors)

        await trio.testing.wait_all_tasks_blocked()
        await engine.sleep(mode="keep")
        assert not found
        await engine.wake()
    assert tuple(found) == expected(*[LONG] * 8)


async def test_new_weights_give_other_embeddings(autojump_clock, simulated):
    engine, _ = simulated
    before = await engine.embed(LONG)
    await engine.update_weights("toy2")
    assert (await engine.embed(LONG)).vectors != before.vectors


async def test_cancelled_all_are_aborted(autojump_clock, simulated):
    engine, _ = simulated
    with trio.move_on_after(0.01) as scope:
        await engine.embed([LONG] * 100)
    assert scope.cancelled_caught
    await engine.check_invariants()


async def test_an_abort_of_one_ends_all(autojump_clock, simulated):
    engine, _ = simulated
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def embed():
            with pytest.raises(SessionEnded, match=r"the request was aborted \(client\)"):
                await engine.embed([LONG] * 100, label="mine")

        await trio.testing.wait_all_tasks_blocked()
        assert engine.abort("mine") > 0


async def test_a_failure_of_one_ends_all(autojump_clock, simulated):
    engine, simulation = simulated
    simulation.worker.runner.fail_requests.update(range(4, 9))
    with pytest.raises(SamplingFailed):
        await engine.embed([LONG] * 30)


async def test_a_timeout(autojump_clock, simulated):
    engine, simulation = simulated
    simulation.worker.stall()
    with pytest.raises(TimedOut):
        await engine.embed([LONG] * 3, timeout=0.5)
    simulation.worker.kill()
    await engine.ready()


async def test_more_inputs_than_slots(autojump_clock):
    """With wait=False only the first one must find a slot."""
    config = EngineConfig(model="toy", max_num_seqs=2, max_num_queued_reqs=0)
    async with simulated_engine(config, limits=replace(LIMITS, max_num_seqs=2)) as (engine, simulation):
        inputs = [[number] for number in range(50)]
        assert (await engine.embed(inputs, wait=False)).vectors == expected(*inputs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.embed, [LONG] * 10)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(EngineOverloaded):
                await engine.embed("a", wait=False)
        await everything_is_given_back(engine, simulation)


async def test_an_embedding_model_answers_nothing(autojump_clock, simulated):
    engine, _ = simulated
    message = "the model is an embedding model, and answers nothing: use engine.embed, or POST /v1/embeddings"
    with pytest.raises(RequestRejected, match=message) as caught:
        await engine.generate("Hello")
    assert caught.value.code == "generation_not_supported"
    async with engine.open_session() as session:
        with pytest.raises(RequestRejected, match=message):
            await session.ask([5, 6], max_tokens=0, prompt_logprobs=1)


async def test_a_model_that_generates_embeds_nothing(autojump_clock):
    async with simulated_engine() as (engine, _):
        with pytest.raises(RequestRejected, match="the model generates texts: it is not an embedding model") as caught:
            await engine.embed("Hello")
        assert caught.value.code == "embeddings_not_supported"


async def test_their_text(autojump_clock, simulated):
    engine, _ = simulated
    assert repr(await engine.embed(["a", "b"])) == "<Embeddings 2 vectors of 8 numbers>"
