"""Other weights: conversations are kept and computed anew, and whatever was computed with the old ones is gone."""

import functools

import pytest
import trio
from helpers.expectations import GREEDY, LONG, chat, reference

from trioengine import EngineAsleep, TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Wake
from trioengine.core.power import Tag
from trioengine.core.types import Cause
from trioengine.testing import toy_answer
from trioengine.testing.toy_weights import toy_weights


def answer_of(engine, path, messages, params=GREEDY):
    ids = engine.tokenizer.apply_chat_template(messages)
    return toy_answer(ids, params.max_tokens, ignore_eos=params.ignore_eos, weights=toy_weights(path))


async def test_there_and_back_in_the_middle_of_a_session(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        for version, path in enumerate(["toy", "new", "toy", "new"], 1):
            if version > 1:
                await engine.update_weights(path)
            assert engine.weights == (path, version)
            async with session.generate("one", GREEDY) as generation:
                completion = await generation.result()
            messages = [*session.history[:-1]]
            assert list(completion.token_ids) == answer_of(engine, path, messages)
            assert (completion.weight_versions, completion.usage.cached_tokens) == ((version,), 0)
    assert simulation.worker.core.statistics().num_preemptions == 0


async def test_a_worker_that_is_lost_later_has_them_again(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.update_weights("new")
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        await anext(generation)
        simulation.worker.kill()
        completion = await generation.result()
    assert list(completion.token_ids) == answer_of(engine, "new", chat("one"), LONG)
    assert (completion.weight_versions, completion.resumed) == ((2,), 1)
    assert engine.limits.weight_version == 2


@pytest.mark.parametrize("asleep", [False, True])
async def test_their_quantization_is_known(autojump_clock, simulated, asleep):
    """At once, from a worker that is started later, and also where an update fails."""
    engine, simulation = simulated
    assert engine.limits.quantization == "none"
    if asleep:
        await engine.sleep()
    await engine.update_weights("quantized weights")
    assert engine.limits.quantization == "gguf"
    with pytest.raises(TransitionFailed):
        await engine.update_weights("misshapen")
    assert engine.limits.quantization == "gguf"
    if asleep:
        await engine.wake()
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        await anext(generation)
        simulation.worker.kill()
        await generation.result()
    assert engine.limits.quantization == "gguf"
    await engine.update_weights("toy")
    assert engine.limits.quantization == "none"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("asleep", [False, True])
async def test_what_becomes_of_a_stream(autojump_clock, simulated, mode, asleep):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as stream:
        await anext(stream)
        if asleep:
            await engine.sleep(mode=mode)
        await engine.update_weights("new", mode=mode)
        if asleep:
            await engine.wake()
        completion = await stream.result()
    old, ids = reference(engine, "one", LONG), list(completion.token_ids)
    if mode == "abort":
        assert (completion.cause, ids) == (Cause.SLEEP, old[: len(ids)])
    elif mode == "wait":
        assert (ids, completion.weight_versions) == (old, (1,))
    else:
        assert (len(ids), completion.weight_versions, completion.resumed) == (200, (1, 2), 0)
        agreed = next(index for index, (left, right) in enumerate(zip(ids, old, strict=True)) if left != right)
        prompt = engine.tokenizer.apply_chat_template(chat("one"))
        switches = range(1, agreed + 1)
        weights = toy_weights("new")
        goes_on = [toy_answer([*prompt, *ids[:at]], 200 - at, ignore_eos=True, weights=weights) for at in switches]
        assert any(ids[at:] == rest for at, rest in zip(switches, goes_on, strict=True))


async def test_rows_that_come_after_a_request_was_suspended_count(autojump_clock, simulated):
    engine, _ = simulated
    for turn in range(60):  # at one of them its first row is on its way when it is suspended
        before = engine.weights
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await trio.sleep(turn / 2000)
            await engine.update_weights(f"new {turn}", mode="keep")
            completion = await generation.result()
        assert completion.token_ids[0] == answer_of(engine, before.path, chat("one"), LONG)[0]
        assert completion.weight_versions == (before.version, before.version + 1)


@pytest.mark.parametrize("asleep", [False, True])
async def test_what_does_not_fit_changes_nothing(autojump_clock, simulated, asleep):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as stream:
        await anext(stream)
        if asleep:
            await engine.sleep(2, mode="keep")
        with pytest.raises(TransitionFailed, match="another architecture") as caught:
            await engine.update_weights("other", mode="keep")
        assert not isinstance(caught.value.__cause__, TransitionFailed)  # itself
        assert engine.state is (Power.ASLEEP if asleep else Power.AWAKE)
        if asleep:
            await engine.wake()
        completion = await stream.result()
    assert list(completion.token_ids) == reference(engine, "one", LONG)
    assert (engine.weights, completion.weight_versions) == (("toy", 1), (1,))


async def test_level_two_waits_for_the_update_where_it_is_told_not_to_reload(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.sleep(2)
    await engine.wake(reload=False)
    assert engine.power.asleep == {Tag.WEIGHTS}
    with pytest.raises(EngineAsleep):
        await engine.generate("one", GREEDY)
    await engine.update_weights("new")
    assert engine.state is Power.AWAKE
    completion = await engine.generate("one", GREEDY)
    assert list(completion.token_ids) == answer_of(engine, "new", chat("one"))
    wakes = [message.tags for message in simulation.worker.received if isinstance(message, Wake)]
    assert wakes == [(Tag.KV_CACHE,), (Tag.WEIGHTS,)]


async def test_what_was_to_wait_for_an_update_is_woken_before_it(autojump_clock, simulated):
    engine, _ = simulated
    await engine.sleep(2)
    await engine.wake(["weights"], reload=False)
    await engine.wake(["weights"])
    await engine.update_weights("new")
    assert engine.power.asleep == {Tag.KV_CACHE}
    await engine.wake()
    assert list((await engine.generate("one", GREEDY)).token_ids) == answer_of(engine, "new", chat("one"))


async def test_weights_that_were_updated_asleep_are_loaded_by_any_wake(autojump_clock, simulated):
    engine, _ = simulated
    for level in (1, 2):
        await engine.sleep(level)
        await engine.update_weights(f"new-{level}")
        assert engine.state is Power.ASLEEP
        await engine.wake(reload=False)
        completion = await engine.generate("one", GREEDY)
        assert list(completion.token_ids) == answer_of(engine, f"new-{level}", chat("one"))


async def test_a_worker_that_died_asleep_is_started_to_be_updated(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.sleep()
    simulation.worker.kill()
    await trio.sleep(10)  # simulated: as long as the longest restart delay, and nobody starts it
    assert engine.statistics().worker_pid is None
    await engine.update_weights("new")
    assert (engine.state, simulation.worker.runner.asleep) == (Power.ASLEEP, {Tag.WEIGHTS, Tag.KV_CACHE})
    await engine.wake()
    assert list((await engine.generate("one", GREEDY)).token_ids) == answer_of(engine, "new", chat("one"))


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_worker_that_dies_under_the_update_has_the_old_ones(autojump_clock, simulated, asleep):
    engine, simulation = simulated
    if asleep:
        await engine.sleep()
    simulation.worker.stall()
    async with trio.open_nursery() as nursery:

        async def update():
            with pytest.raises(TransitionFailed, match="SIGKILL"):
                await engine.update_weights("new")

        nursery.start_soon(update)
        await trio.testing.wait_all_tasks_blocked()
        simulation.worker.kill()
    assert engine.weights == ("toy", 1)
    if asleep:
        await engine.wake()
    completion = await engine.generate("one", GREEDY, wait=True)
    assert list(completion.token_ids) == reference(engine, "one")


async def test_a_worker_that_dies_before_it_is_told_is_replaced_and_updated(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as stream:
        await anext(stream)
        simulation.worker.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(engine.update_weights, "new", mode="keep"))
            await trio.testing.wait_all_tasks_blocked()
            simulation.worker.kill()
        completion = await stream.result()
    assert (completion.weight_versions, len(simulation.workers)) == ((1, 2), 2)


async def test_an_update_waits_behind_a_sleep(autojump_clock, simulated):
    engine, _ = simulated
    async with trio.open_nursery() as nursery:
        for call in (engine.sleep, functools.partial(engine.update_weights, "new"), engine.wake):
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
    completion = await engine.generate("one", GREEDY)
    assert list(completion.token_ids) == answer_of(engine, "new", chat("one"))
