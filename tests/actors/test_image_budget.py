"""Requests with images that wait: for room in the budget, and for their turn to be copied."""

from dataclasses import replace
from functools import partial

import pytest
import trio
from helpers.image_sessions import (
    EIGHT,
    LONG,
    OTHER,
    PICTURE,
    SIZE,
    ask,
    content_of,
    engine_for_images,
    reference,
)
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineOverloaded, RequestRejected, SessionEnded, TimedOut
from trioengine.actors.payload import PayloadBudget
from trioengine.testing.simulated_worker import Behaviour

# ---- copying ------------------------------------------------------------------------------------------------------


async def test_images_are_copied_one_request_after_the_other(autojump_clock):
    running, most = 0, 0

    async def finish_in_thread(function, *args):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await trio.lowlevel.cancel_shielded_checkpoint()
        running -= 1
        return function(*args)

    async with engine_for_images() as (engine, _):
        images = engine.runtime.images
        images.ports = replace(images.ports, finish_in_thread=finish_in_thread)

        async def ask_one():
            async with engine.open_session() as session:
                await ask(session, "What?", media=[PICTURE])

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask_one)
        assert most == 1


# ---- the budget ---------------------------------------------------------------------------------------------------


async def test_what_is_larger_than_the_budget_is_refused_at_once(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, _):
        with pytest.raises(RequestRejected, match="the engine takes at most") as caught:
            await engine.generate("What?", EIGHT, media=[PICTURE, OTHER], wait=True)
        assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("payload_memory", "max_payloads", "reason"),
    [(SIZE, 2, f"requests hold {SIZE} of {SIZE} bytes"), (2 * SIZE, 1, "requests hold 1 of 1 images")],
)
def test_the_error_names_the_bound_that_is_reached(payload_memory, max_payloads, reason):
    budget = PayloadBudget(payload_memory, max_payloads)
    reservation = budget.reserve_now(SIZE, 1)
    with pytest.raises(EngineOverloaded, match=f"have to wait: {reason}$"):
        budget.reserve_now(SIZE, 1)
    reservation.give_back()


async def test_a_request_waits_for_room(autojump_clock):
    async with engine_for_images(payload_memory=SIZE, behaviour=Behaviour(decode_time=0.5)) as (engine, _):
        async with engine.open_session() as first, engine.open_session() as second:
            async with first.generate("What?", LONG, media=[PICTURE]):
                assert engine.statistics().payload_bytes_inflight == SIZE
                with pytest.raises(EngineOverloaded, match="have to wait") as caught:
                    await ask(second, "And?", media=[OTHER], wait=False)
                assert caught.value.code == "payloads"
                with pytest.raises(TimedOut, match=r"timed out after 0\.01 s"):
                    await ask(second, "And?", media=[OTHER], timeout=0.01)
                generation, completion = await ask(second, "And?", media=[OTHER])
                assert completion.token_ids == reference(generation, OTHER)


async def test_a_history_without_images_needs_no_room(autojump_clock):
    async with engine_for_images(payload_memory=SIZE, behaviour=Behaviour(decode_time=0.5)) as (engine, _):
        async with engine.open_session() as first, engine.open_session() as other, trio.open_nursery() as nursery:
            async with first.generate("What?", LONG, media=[PICTURE]):
                nursery.start_soon(partial(engine.generate, "And?", EIGHT, media=[OTHER]))
                await wait_all_tasks_blocked()
                assert len(engine.runtime.images.budget.line) == 1
                other.replace_history([{"role": "user", "content": "Hi."}])


async def test_a_request_does_not_wait_for_room_for_ever(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        async with engine.open_session() as first, engine.open_session() as second:
            async with first.generate("What?", LONG, media=[PICTURE]):
                simulation.worker.payloads.by_hand = True
                simulation.worker.stall(100)
                began = trio.current_time()
                with pytest.raises(EngineOverloaded):
                    await ask(second, "And?", media=[OTHER])
                assert trio.current_time() - began == pytest.approx(60)
                simulation.worker.kill()
        await engine.ready()


async def in_the_line(engine, simulation, nursery):
    """One picture of two is on its way, a request for two pictures waits for room, and can be cancelled."""
    simulation.worker.payloads.by_hand = True
    nursery.start_soon(partial(engine.generate, "What?", EIGHT, media=[PICTURE]))
    await wait_all_tasks_blocked()
    scope = trio.CancelScope()

    async def wait():
        with scope:
            await engine.generate("What?", EIGHT, media=[PICTURE, OTHER])

    nursery.start_soon(wait)
    await wait_all_tasks_blocked()
    assert len(engine.runtime.images.budget.line) == 1
    return scope


async def test_a_session_that_ends_while_its_history_waits_for_room(autojump_clock):
    history = [content_of(OTHER)]
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation), trio.open_nursery() as nursery:
        simulation.worker.payloads.by_hand = True
        nursery.start_soon(partial(engine.generate, "What?", EIGHT, media=[PICTURE]))
        await wait_all_tasks_blocked()
        session, entered = engine.open_session(history=history), trio.Event()

        async def enter():
            with pytest.raises(SessionEnded) as caught:
                await session.__aenter__()
            assert caught.value.cause == "client"
            entered.set()

        nursery.start_soon(enter)
        await wait_all_tasks_blocked()
        assert len(engine.runtime.images.budget.line) == 1
        session.end()
        await wait_all_tasks_blocked()
        assert entered.is_set() and engine.statistics().rejected == 1
        simulation.worker.payloads.by_hand = False
        simulation.worker.receive_payloads()


async def test_a_session_that_ends_while_its_history_is_copied(autojump_clock):
    """The thread is waited for."""
    async with engine_for_images() as (engine, simulation), trio.open_nursery() as nursery:
        session = engine.open_session(history=[content_of(PICTURE)])

        async def enter():
            with pytest.raises(SessionEnded):
                await session.__aenter__()

        nursery.start_soon(enter)
        while engine.runtime.images.copying.value != 0:
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        session.end()
        await wait_all_tasks_blocked()
        assert engine.statistics().rejected == 1 and not simulation.memfds


@pytest.mark.parametrize("call", ["generate", "keep_images", "open_session"])
async def test_the_turn_to_copy_images_is_awaited_until_the_deadline(autojump_clock, call):
    async with engine_for_images() as (engine, _), engine.runtime.images.copying:
        with trio.fail_after(2), pytest.raises(TimedOut, match="timed out after 1 s"):
            if call == "generate":
                await engine.generate("What?", EIGHT, media=[PICTURE], timeout=1)
            elif call == "keep_images":
                await engine.keep_images([content_of(PICTURE)], timeout=1)
            else:
                await engine.open_session(history=[content_of(PICTURE)], timeout=1).__aenter__()


async def test_a_small_image_does_not_overtake_large_ones_that_wait(autojump_clock):
    async with engine_for_images(payload_memory=2 * SIZE) as (engine, simulation):
        async with trio.open_nursery() as nursery:
            await in_the_line(engine, simulation, nursery)
            with pytest.raises(EngineOverloaded, match="have to wait") as caught:
                await engine.generate("And?", EIGHT, media=[OTHER], wait=False)
            assert caught.value.code == "payloads"
            nursery.start_soon(partial(engine.generate, "And?", EIGHT, media=[OTHER]))
            await wait_all_tasks_blocked()
            assert len(engine.runtime.images.budget.line) == 2
            simulation.worker.payloads.by_hand = False
            simulation.worker.receive_payloads()


async def test_who_waits_behind_one_that_leaves_gets_the_room(autojump_clock):
    async with engine_for_images(payload_memory=2 * SIZE) as (engine, simulation):
        async with trio.open_nursery() as nursery:
            scope = await in_the_line(engine, simulation, nursery)
            nursery.start_soon(partial(engine.generate, "And?", EIGHT, media=[OTHER]))
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not len(engine.runtime.images.budget.line)
            simulation.worker.payloads.by_hand = False
            simulation.worker.receive_payloads()


async def test_the_next_turn_names_the_image_that_was_dropped(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, _):
        async with engine.open_session() as first, engine.open_session() as second:
            await ask(first, "What?", media=[PICTURE])
            await ask(second, "What?", media=[OTHER])
            with pytest.raises(RequestRejected, match=r"history\[0\].content\[0\]: the image is not kept") as caught:
                await ask(first, "And?")
            assert caught.value.code == "image_dropped"
            await ask(second, "And?")
