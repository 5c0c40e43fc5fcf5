"""Requests with images that are ended, put to sleep, or lose their worker: payloads are given back once."""

import gc
import weakref
from functools import partial

import pytest
import trio
from helpers.expectations import until
from helpers.image_sessions import (
    LONG,
    OTHER,
    PICTURE,
    SIZE,
    ask,
    content_of,
    engine_for_images,
    reference,
)
from helpers.pictures import png
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineOverloaded, RequestRejected, SessionBusy, TimedOut
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine


async def test_a_worker_dies_with_payloads_in_the_socket(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        simulation.worker.payloads.by_hand = True
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE, OTHER]) as generation:
                await trio.sleep(0.1)
                assert len(simulation.worker.payloads) == 2
                simulation.worker.kill()
                assert (await generation.result()).token_ids == reference(generation, PICTURE, OTHER)
                assert generation.completion.resumed == 1


async def test_a_worker_dies_in_the_middle_of_the_answer(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
                assert engine.statistics().payload_bytes_inflight == 0
                simulation.worker.kill()
                assert (await generation.result()).token_ids == reference(generation, PICTURE)


async def test_a_request_whose_image_was_dropped_does_not_go_on(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        async with engine.open_session() as session, engine.open_session() as other:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
                await ask(other, "What?", media=[OTHER])
                simulation.worker.kill()
                with pytest.raises(RequestRejected, match="the image is not kept any more"):
                    await generation.result()
                assert generation._state.recovery.resumed == 0


async def test_a_suspect_whose_image_was_dropped_is_not_tried(autojump_clock):
    """It was in flight at two deaths, and has got no token: it is to be tried alone, and cannot be."""
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        async with engine.open_session() as session, engine.open_session() as other:
            async with session.generate("What?" * 40, LONG, media=[PICTURE]) as generation:
                for incarnation in (1, 2):
                    while engine.statistics().incarnation < incarnation or engine.runtime.gate.link is None:
                        await engine.runtime.gate.changed()
                    await until(engine, lambda: not engine.statistics().payload_bytes_inflight)
                    if incarnation == 2:
                        other.replace_history([content_of(OTHER)])
                    simulation.worker.kill()
                with pytest.raises(RequestRejected, match="the image is not kept any more"):
                    await generation.result()
                assert (generation._state.num_tokens, generation._state.recovery.resumed) == (0, 1)
            generation, completion = await ask(other, "And?")
            assert completion.token_ids == reference(generation, OTHER)
            assert engine.statistics().incarnation == 3


async def test_a_request_that_waits_for_room_takes_none_of_a_request_that_lost_its_worker(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        simulation.worker.payloads.by_hand = True
        async with engine.open_session() as first, engine.open_session() as second, trio.open_nursery() as nursery:

            async def ask_about(session, picture):
                generation, completion = await ask(session, "What?", media=[picture], wait=True)
                assert completion.token_ids == reference(generation, picture)

            for session, picture in ((first, PICTURE), (second, OTHER)):
                nursery.start_soon(ask_about, session, picture)
                await wait_all_tasks_blocked()
            assert len(engine.runtime.images.budget.line) == 1
            simulation.worker.kill()


@pytest.mark.parametrize("way", ["wake", "abort", "end", "close"])
async def test_the_images_of_a_suspended_request_stay_until_it_goes_on_or_ends(autojump_clock, way):
    async with engine_for_images(payload_memory=SIZE) as (engine, _):
        async with engine.open_session() as session, session.generate("What?", LONG, media=[PICTURE]) as generation:
            await anext(generation)
            assert engine.statistics().payload_bytes_inflight == 0
            await engine.sleep(mode="keep")
            assert engine.statistics().payload_bytes_inflight == SIZE
            with pytest.raises(EngineOverloaded, match="have to wait"):
                await engine.keep_images([content_of(OTHER)], wait=False)
            match way:
                case "abort":
                    generation.abort()
                case "end":
                    session.end()
                case "close":
                    engine.close()
                case "wake":
                    await engine.wake()
                    assert (await generation.result()).token_ids == reference(generation, PICTURE)
            await generation.wait_settled()
            assert engine.statistics().payload_bytes_inflight == 0
        if way != "close":
            await engine.wake()


async def test_a_broken_payload_socket_ends_the_worker(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            simulation.worker.break_payloads()
            generation, completion = await ask(session, "What?", media=[PICTURE])
            assert completion.token_ids == reference(generation, PICTURE)
        assert engine.statistics().incarnation == 2


@pytest.mark.parametrize("way", ["abort", "end", "leave"])
async def test_a_request_that_waits_for_its_payload_is_ended(autojump_clock, way):
    async with engine_for_images() as (engine, simulation):
        simulation.worker.payloads.by_hand = True
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await trio.sleep(0.1)
                if way == "abort":
                    generation.abort()
                    assert (await generation.result()).cause is Cause.CLIENT
                elif way == "end":
                    session.end()
            await engine.check_invariants()
            assert engine.statistics().payload_bytes_inflight == SIZE
            simulation.worker.receive_payloads()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_sleep_while_a_request_waits_for_its_payload(autojump_clock, mode):
    async with engine_for_images() as (engine, simulation):
        simulation.worker.payloads.by_hand = True
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await trio.sleep(0.1)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(engine.sleep, mode=mode))
                    await trio.sleep(0.1)
                    simulation.worker.payloads.by_hand = False
                    simulation.worker.receive_payloads()
                await engine.wake()
                completion = await generation.result()
            if mode == "abort":
                assert completion.cause is Cause.SLEEP
            else:
                assert completion.token_ids == reference(generation, PICTURE)


async def test_an_engine_that_closes_gives_everything_back(autojump_clock):
    async with engine_for_images() as (engine, _):
        session = engine.open_session()
        await session.__aenter__()
        await ask(session, "What?", media=[PICTURE])
        generation = session.generate("And?", LONG, media=[OTHER])
        await generation.__aenter__()
        engine.close()
    assert engine.statistics().payload_bytes_kept == 0


class Buffer(bytearray):
    """Bytes that can be referred to weakly."""


async def test_the_bytes_are_gone_while_the_answer_is_streamed(autojump_clock):
    """Where the caller lets go of them: no frame of the engine, however long it lives, keeps an image."""
    async with engine_for_images() as (engine, _):
        references = []

        async def one_shot():
            media = [Buffer(png(30, 30))]
            references.append(weakref.ref(media[0]))
            asking = engine.generate("What?", LONG, media=media)
            del media
            await asking

        async with engine.open_session() as session, trio.open_nursery() as nursery:
            media = [Buffer(png(20, 20))]
            references.append(weakref.ref(media[0]))
            generation = session.generate("What?", LONG, media=media)
            del media
            async with generation:
                nursery.start_soon(one_shot)
                await anext(generation)
                await trio.sleep(0.2)
                gc.collect()
                assert [reference() for reference in references] == [None, None]
                nursery.cancel_scope.cancel()


async def test_the_bytes_of_a_refused_request_are_gone(autojump_clock):
    """Its Generation, which the caller may keep, does not keep them."""
    async with engine_for_images() as (engine, _), engine.open_session() as session:
        async with session.generate("What?", LONG):
            media = [Buffer(png(20, 20))]
            reference = weakref.ref(media[0])
            refused = session.generate("What?", LONG, media=media)
            del media
            with pytest.raises(SessionBusy):
                await refused.__aenter__()
            gc.collect()
            assert reference() is None
            assert "refused" in repr(refused)


# ---- images that are kept for later requests ------------------------------------------------------------------------


async def test_kept_images_are_for_requests_of_any_session(autojump_clock):
    async with engine_for_images() as (engine, _):
        with await engine.keep_images([content_of(PICTURE)]) as kept:
            assert engine.statistics().payload_bytes_kept == SIZE
            for _ in range(2):
                async with engine.open_session() as session:
                    generation, completion = await ask(session, kept.messages)
                    assert completion.token_ids == reference(generation, PICTURE)
            assert engine.statistics().payload_bytes_kept == SIZE


async def test_a_session_keeps_what_is_released(autojump_clock):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as session:
            with await engine.keep_images([content_of(PICTURE)]) as kept:
                await ask(session, kept.messages)
                kept.release()
            generation, completion = await ask(session, "And?")
            assert completion.token_ids == reference(generation, PICTURE)


async def test_what_cannot_be_kept(autojump_clock):
    url = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    async with engine_for_images(payload_memory=SIZE) as (engine, _):
        with pytest.raises(RequestRejected) as caught:
            await engine.keep_images([{"role": "user", "content": "x"}, {"role": "user", "content": [url]}], where="in")
        assert (caught.value.code, caught.value.param) == ("invalid_image_url", "in[1].content[0].image_url.url")
        async with engine.open_session() as session, session.generate("What?", LONG, media=[PICTURE]):
            with pytest.raises(EngineOverloaded, match="have to wait"):
                await engine.keep_images([content_of(OTHER)], wait=False)
            with pytest.raises(TimedOut):
                await engine.keep_images([content_of(OTHER)], timeout=0.0001)


async def test_a_kept_image_may_be_dropped(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, _):
        with await engine.keep_images([content_of(PICTURE)]) as kept:
            with await engine.keep_images([content_of(OTHER)]):
                async with engine.open_session() as session:
                    with pytest.raises(RequestRejected, match="the image is not kept any more") as caught:
                        await ask(session, kept.messages)
                    assert caught.value.code == "image_dropped"


async def test_whether_a_model_takes_images(autojump_clock):
    async with engine_for_images() as (engine, _):
        assert engine.runtime.takes_images
    async with simulated_engine() as (engine, _):
        assert not engine.runtime.takes_images
