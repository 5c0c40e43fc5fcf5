"""Images in requests: right answers, payloads that are given back once, and every way in which one can fail."""

import base64
import gc
import struct
import weakref
import zlib
from functools import partial

import pytest
import trio
from expectations import everything_is_given_back
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, EngineOverloaded, FinishReason, RequestRejected, SamplingParams, TimedOut
from trioengine.core.outcome import Cause
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import IMAGE_LIMITS
from trioengine.testing.toy_model import toy_answer
from trioengine.testing.toy_vision import ToyPicture

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PICTURE, OTHER, UNREADABLE = ToyPicture(12, 9, 7), ToyPicture(12, 9, 8), ToyPicture(12, 9, 255)
SIZE = len(PICTURE.data)


def engine_for_images(**options):
    behaviour = options.pop("behaviour", Behaviour())
    config = EngineConfig(model="toy", max_num_seqs=8, max_num_batched_tokens=64, **options)
    return simulated_engine(config, limits=IMAGE_LIMITS, behaviours=[behaviour], thread_passes=2)


def reference(generation, *pictures):
    """What the toy model answers to the prompt of a generation with these pictures."""
    prepared, params = generation.prepared, generation.params
    images = [
        ([span.start for span in placed.spans], picture.data)
        for placed, picture in zip(prepared.images, pictures, strict=True)
    ]
    return tuple(toy_answer(prepared.token_ids, params.max_tokens, ignore_eos=True, images=images))


async def ask(session, text, params=EIGHT, **options):
    async with session.generate(text, params, **options) as generation:
        return generation, await generation.result()


async def nothing_is_left(engine, simulation):
    await everything_is_given_back(engine, simulation)
    statistics = engine.statistics()
    assert (statistics.payload_bytes_inflight, statistics.payload_bytes_kept) == (0, 0)
    assert not simulation.memfds
    assert not len(engine.payloads.line)


def png(width, height, *, level=9):
    """A grey PNG."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(b"\0" * (height * (width + 1)), level)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


# ---- answers ------------------------------------------------------------------------------------------------------


async def test_an_answer_depends_on_the_image(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        for picture in (PICTURE, OTHER, PICTURE):
            async with engine.open_session() as session:
                generation, completion = await ask(session, "What?", media=[picture])
                assert completion.token_ids == reference(generation, picture)
        await nothing_is_left(engine, simulation)


async def test_images_of_earlier_turns_stay(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            await ask(session, "What?", media=[PICTURE, OTHER])
            generation, completion = await ask(session, "And this?", media=[OTHER])
            assert completion.token_ids == reference(generation, PICTURE, OTHER, OTHER)
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE, OTHER, OTHER)
            assert completion.usage.cached_tokens > 0
            assert engine.statistics().payload_bytes_kept == 3 * SIZE
        await nothing_is_left(engine, simulation)


async def test_an_image_of_a_history_is_used_in_another_session(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as first:
            await ask(first, "What?", media=[PICTURE])
            async with engine.open_session(history=first.history) as second:
                first.end()
                generation, completion = await ask(second, "And?")
                assert completion.token_ids == reference(generation, PICTURE)
        await nothing_is_left(engine, simulation)


async def test_a_history_may_begin_with_images(autojump_clock):
    history = [
        {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "Look"}]},
        {"role": "assistant", "content": "Yes"},
    ]
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session(history=history) as session:
            assert engine.statistics().payload_bytes_kept == SIZE
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE)
            session.replace_history([])
            assert engine.statistics().payload_bytes_kept == 0
            session.replace_history(history)
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE)
        await nothing_is_left(engine, simulation)


async def test_files_bytes_and_data_urls(autojump_clock, tmp_path):
    data = png(9, 3)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    async with engine_for_images() as (engine, simulation):
        answers = []
        for media in (data, bytearray(data), memoryview(data), path, str(path)):
            async with engine.open_session() as session:
                answers.append((await ask(session, "What?", media=[media]))[1].token_ids)
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        answers.append((await engine.generate([{"role": "user", "content": content}], EIGHT)).token_ids)
        assert len(set(answers)) == 1
        await nothing_is_left(engine, simulation)


async def test_a_turn_that_is_taken_back_gives_its_image_back(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
            assert engine.statistics().payload_bytes_kept == 0
            _, completion = await ask(session, "And?")
            assert completion.finish_reason is FinishReason.LENGTH
            assert session.history[0]["content"] == "And?"
        await nothing_is_left(engine, simulation)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media", "code", "why"),
    [
        ([b"GIF89a"], "image_parse_error", r"messages\[0\].content\[0\]: the GIF image is truncated"),
        ([b"what"], "invalid_image_format", "not a PNG, JPEG, WebP or GIF image"),
        ([""], "invalid_value", "cannot read"),
        (["/nowhere/picture.png"], "invalid_value", "No such file"),
        ([3], "invalid_value", "must be bytes, a path or a PIL image, got int"),
        (b"bytes", "invalid_value", "media must be a list"),
        ([png(70_000, 1)], "image_too_large", "70000 x 1"),
        ([ToyPicture(100_000, 1)], "image_too_large", "100000 x 1"),
    ],
)
async def test_what_is_no_image_is_refused(autojump_clock, media, code, why):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            with pytest.raises(RequestRejected, match=why) as caught:
                await ask(session, "What?", media=media)
            assert caught.value.code == code
            assert caught.value.param.startswith(("media", "messages[0].content[0]"))
            await ask(session, "What?", media=[PICTURE])
        await nothing_is_left(engine, simulation)


async def test_a_model_for_text_takes_no_images(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        with pytest.raises(RequestRejected, match="model 'toy' takes no images") as caught:
            await engine.generate("What?", EIGHT, media=[PICTURE])
        assert caught.value.code == "images_not_supported"
        assert not simulation.memfds


async def test_token_ids_take_no_media(autojump_clock):
    async with engine_for_images() as (engine, _):
        with pytest.raises(RequestRejected, match="media: images need a text or chat messages"):
            await engine.generate([1, 2], EIGHT, media=[PICTURE])


async def test_one_bad_image_fails_its_own_request(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as good, engine.open_session() as bad:
            async with good.generate("What?", LONG, media=[PICTURE]) as generation:
                with pytest.raises(
                    RequestRejected, match=r"messages\[0\].content\[1\]: the toy model cannot"
                ) as caught:
                    await ask(bad, "What?", media=[OTHER, UNREADABLE])
                assert caught.value.code == "invalid_image"
                assert (await generation.result()).token_ids == reference(generation, PICTURE)
            assert bad.history == []
        await nothing_is_left(engine, simulation)


# ---- the budget ---------------------------------------------------------------------------------------------------


async def test_what_is_larger_than_the_budget_is_refused_at_once(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        with pytest.raises(RequestRejected, match="the engine takes at most") as caught:
            await engine.generate("What?", EIGHT, media=[PICTURE, OTHER], wait=True)
        assert caught.value.code == "too_large"
        await nothing_is_left(engine, simulation)


async def test_a_request_waits_for_room(autojump_clock):
    async with engine_for_images(payload_memory=SIZE, behaviour=Behaviour(decode_time=0.5)) as (engine, simulation):
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
        await nothing_is_left(engine, simulation)


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


async def test_the_next_turn_names_the_image_that_was_dropped(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        async with engine.open_session() as first, engine.open_session() as second:
            await ask(first, "What?", media=[PICTURE])
            await ask(second, "What?", media=[OTHER])
            with pytest.raises(RequestRejected, match=r"history\[0\].content\[0\]: the image is not kept") as caught:
                await ask(first, "And?")
            assert caught.value.code == "image_dropped"
            await ask(second, "And?")
        await nothing_is_left(engine, simulation)


# ---- lifecycle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", range(14))
async def test_cancelled_at_any_pass_nothing_is_left(autojump_clock, passes):
    """From the reservation to the send, and beyond: whatever was reserved or sealed is given back, once."""
    async with engine_for_images() as (engine, simulation):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(engine.generate, "What?", LONG, media=[PICTURE, OTHER]))
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        await nothing_is_left(engine, simulation)


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
        await nothing_is_left(engine, simulation)


async def test_a_worker_dies_in_the_middle_of_the_answer(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
                assert engine.statistics().payload_bytes_inflight == 0
                simulation.worker.kill()
                assert (await generation.result()).token_ids == reference(generation, PICTURE)
        await nothing_is_left(engine, simulation)


async def test_a_request_whose_image_was_dropped_does_not_go_on(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        async with engine.open_session() as session, engine.open_session() as other:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
                await ask(other, "What?", media=[OTHER])
                simulation.worker.kill()
                with pytest.raises(RequestRejected, match="the image is not kept any more"):
                    await generation.result()
        await nothing_is_left(engine, simulation)


async def test_a_broken_payload_socket_ends_the_worker(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            simulation.worker.break_payloads()
            generation, completion = await ask(session, "What?", media=[PICTURE])
            assert completion.token_ids == reference(generation, PICTURE)
        assert engine.statistics().incarnation == 2
        await nothing_is_left(engine, simulation)


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
        await nothing_is_left(engine, simulation)


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
        await nothing_is_left(engine, simulation)


async def test_an_engine_that_closes_gives_everything_back(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        session = engine.open_session()
        await session.__aenter__()
        await ask(session, "What?", media=[PICTURE])
        generation = session.generate("And?", LONG, media=[OTHER])
        await generation.__aenter__()
    assert not simulation.memfds
    assert engine.statistics().payload_bytes_kept == 0


class Buffer(bytearray):
    """Bytes that can be referred to weakly."""


async def test_the_bytes_are_gone_while_the_answer_is_streamed(autojump_clock):
    """Where the caller lets go of them: no frame of the engine, however long it lives, keeps an image."""
    async with engine_for_images() as (engine, simulation):
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
        await nothing_is_left(engine, simulation)


# ---- images that are kept for later requests ------------------------------------------------------------------------


def content_of(*images, text="What?"):
    return {"role": "user", "content": [*({"type": "image", "image": image} for image in images), text_part(text)]}


def text_part(text):
    return {"type": "text", "text": text}


async def test_kept_images_are_for_requests_of_any_session(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        with await engine.keep_images([content_of(PICTURE)]) as kept:
            assert engine.statistics().payload_bytes_kept == SIZE
            for _ in range(2):
                async with engine.open_session() as session:
                    generation, completion = await ask(session, kept.messages)
                    assert completion.token_ids == reference(generation, PICTURE)
            assert engine.statistics().payload_bytes_kept == SIZE
        await nothing_is_left(engine, simulation)


async def test_a_session_keeps_what_is_released(autojump_clock):
    async with engine_for_images() as (engine, simulation):
        async with engine.open_session() as session:
            with await engine.keep_images([content_of(PICTURE)]) as kept:
                await ask(session, kept.messages)
                kept.release()
            generation, completion = await ask(session, "And?")
            assert completion.token_ids == reference(generation, PICTURE)
        await nothing_is_left(engine, simulation)


@pytest.mark.parametrize("passes", range(5))
async def test_cancelled_at_any_pass_no_image_is_kept(autojump_clock, passes):
    async with engine_for_images() as (engine, simulation):

        async def keep():
            with await engine.keep_images([content_of(PICTURE, OTHER)]):
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await nothing_is_left(engine, simulation)


async def test_what_cannot_be_kept(autojump_clock):
    url = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        with pytest.raises(RequestRejected) as caught:
            await engine.keep_images([{"role": "user", "content": "x"}, {"role": "user", "content": [url]}], where="in")
        assert (caught.value.code, caught.value.param) == ("invalid_image_url", "in[1].content[0].image_url.url")
        async with engine.open_session() as session, session.generate("What?", LONG, media=[PICTURE]):
            with pytest.raises(EngineOverloaded, match="have to wait"):
                await engine.keep_images([content_of(OTHER)], wait=False)
            with pytest.raises(TimedOut):
                await engine.keep_images([content_of(OTHER)], timeout=0.0001)
        await nothing_is_left(engine, simulation)


async def test_a_kept_image_may_be_dropped(autojump_clock):
    async with engine_for_images(payload_memory=SIZE) as (engine, simulation):
        with await engine.keep_images([content_of(PICTURE)]) as kept:
            with await engine.keep_images([content_of(OTHER)]):
                async with engine.open_session() as session:
                    with pytest.raises(RequestRejected, match="the image is not kept any more") as caught:
                        await ask(session, kept.messages)
                    assert caught.value.code == "image_dropped"
        await nothing_is_left(engine, simulation)


async def test_whether_a_model_takes_images(autojump_clock):
    async with engine_for_images() as (engine, _):
        assert engine.takes_images
    async with simulated_engine() as (engine, _):
        assert not engine.takes_images
