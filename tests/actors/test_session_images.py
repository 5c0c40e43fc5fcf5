"""Images in requests: right answers, refusals, and the budget."""

import base64
import os
from dataclasses import replace
from functools import partial

import pytest
import trio
from image_sessions import (
    EIGHT,
    LONG,
    OTHER,
    PICTURE,
    SIZE,
    UNREADABLE,
    ask,
    content_of,
    engine_for_images,
    reference,
)
from pictures import png
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineOverloaded, FinishReason, RequestRejected, SessionEnded, TimedOut
from trioengine.actors.media import source_of
from trioengine.actors.payload import PayloadBudget
from trioengine.client.media import image_part
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import SealFailure
from trioengine.testing.toy_vision import DamagedPicture, ToyPicture

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
        engine.ports = replace(engine.ports, finish_in_thread=finish_in_thread)

        async def ask_one():
            async with engine.open_session() as session:
                await ask(session, "What?", media=[PICTURE])

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask_one)
        assert most == 1


# ---- answers ------------------------------------------------------------------------------------------------------


async def test_an_answer_depends_on_the_image(autojump_clock):
    async with engine_for_images() as (engine, _):
        for picture in (PICTURE, OTHER, PICTURE):
            async with engine.open_session() as session:
                generation, completion = await ask(session, "What?", media=[picture])
                assert completion.token_ids == reference(generation, picture)


async def test_images_of_earlier_turns_stay(autojump_clock):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as session:
            await ask(session, "What?", media=[PICTURE, OTHER])
            generation, completion = await ask(session, "And this?", media=[OTHER])
            assert completion.token_ids == reference(generation, PICTURE, OTHER, OTHER)
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE, OTHER, OTHER)
            assert completion.usage.cached_tokens > 0
            assert engine.statistics().payload_bytes_kept == 3 * SIZE


async def test_an_image_of_a_history_is_used_in_another_session(autojump_clock):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as first:
            await ask(first, "What?", media=[PICTURE])
            async with engine.open_session(history=first.history) as second:
                first.end()
                generation, completion = await ask(second, "And?")
                assert completion.token_ids == reference(generation, PICTURE)


async def test_a_history_may_begin_with_images(autojump_clock):
    history = [content_of(PICTURE), {"role": "assistant", "content": "Yes"}]
    async with engine_for_images() as (engine, _):
        async with engine.open_session(history=history) as session:
            assert engine.statistics().payload_bytes_kept == SIZE
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE)
            session.replace_history([])
            assert engine.statistics().payload_bytes_kept == 0
            session.replace_history(history)
            generation, completion = await ask(session, "So?")
            assert completion.token_ids == reference(generation, PICTURE)


async def test_files_bytes_and_data_urls(autojump_clock, tmp_path):
    data = png(9, 3)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    async with engine_for_images() as (engine, _):
        answers = []
        for media in (data, bytearray(data), memoryview(data), path, str(path)):
            async with engine.open_session() as session:
                answers.append((await ask(session, "What?", media=[media]))[1].token_ids)
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        answers.append((await engine.generate([{"role": "user", "content": content}], EIGHT)).token_ids)
        assert len(set(answers)) == 1


async def test_a_turn_that_is_taken_back_gives_its_image_back(autojump_clock):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as session:
            async with session.generate("What?", LONG, media=[PICTURE]) as generation:
                await anext(generation)
            assert engine.statistics().payload_bytes_kept == 0
            _, completion = await ask(session, "And?")
            assert completion.finish_reason is FinishReason.LENGTH
            assert session.history[0]["content"] == "And?"


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media", "code", "why"),
    [
        ([b"GIF89a"], "image_parse_error", r"media\[0\]: the GIF image is truncated"),
        ([b"what"], "invalid_image_format", "not a PNG, JPEG, WebP or GIF image"),
        ([""], "invalid_value", "cannot read"),
        (["/nowhere/picture.png"], "invalid_value", "No such file"),
        ([3], "invalid_value", "must be bytes, a path or a PIL image, got int"),
        (b"bytes", "invalid_value", "media must be a list"),
        ([png(70_000, 1)], "image_too_large", "70000 x 1"),
        ([ToyPicture(100_000, 1)], "image_too_large", "100000 x 1"),
        (
            [DamagedPicture(12, 9)],
            "image_parse_error",
            r"media\[0\]: the PIL image cannot be read: 'image file is truncated",
        ),
    ],
)
async def test_what_is_no_image_is_refused(autojump_clock, media, code, why):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as session:
            with pytest.raises(RequestRejected, match=why) as caught:
                await ask(session, "What?", media=media)
            assert caught.value.code == code
            assert caught.value.param.startswith("media")
            await ask(session, "What?", media=[PICTURE])


def test_a_file_that_goes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(png(9, 3))
    _, chunks = source_of(path, "media[0]").open()
    path.unlink()
    with pytest.raises(RequestRejected, match=r"^media\[0\]: cannot read .*: No such file"):
        list(chunks)


@pytest.mark.parametrize("read", [partial(source_of, where="media[0]"), partial(image_part, where="media[0]")])
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path, read):
    """To open a pipe blocks until it has a writer."""
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, tmp_path):
        with pytest.raises(RequestRejected, match=r"^media\[0\]: cannot read .*: Not a regular file$"):
            read(path)


@pytest.mark.parametrize("failure", SealFailure)
async def test_bytes_that_cannot_be_sealed_overload_the_engine(autojump_clock, failure):
    async with engine_for_images() as (engine, simulation):
        simulation.failing_seals = [failure]
        with pytest.raises(EngineOverloaded, match=r"no memory for an image: .*Errno") as caught:
            await engine.generate("What?", EIGHT, media=[PICTURE, OTHER])
        assert caught.value.code == "payloads"
        await engine.generate("What?", EIGHT, media=[PICTURE, OTHER])


async def test_a_model_for_text_takes_no_images(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        with pytest.raises(RequestRejected, match="model 'toy' takes no images; HuggingFaceTB/SmolVLM") as caught:
            await engine.generate("What?", EIGHT, media=[PICTURE])
        assert caught.value.code == "images_not_supported"
        assert not simulation.memfds


async def test_token_ids_take_no_media(autojump_clock):
    async with engine_for_images() as (engine, _):
        with pytest.raises(RequestRejected, match="media: images need a text or chat messages"):
            await engine.generate([1, 2], EIGHT, media=[PICTURE])


@pytest.mark.parametrize("image", [b"what", OTHER], ids=["no image", "no room"])
async def test_a_session_that_is_refused_for_its_history_is_counted(autojump_clock, image):
    history = [content_of(image)]
    async with engine_for_images(payload_memory=SIZE - 1) as (engine, _):
        with pytest.raises(RequestRejected):
            await engine.open_session(history=history).__aenter__()
        assert (engine.statistics().sessions, engine.statistics().rejected) == (0, 1)


async def test_one_bad_image_fails_its_own_request(autojump_clock):
    async with engine_for_images() as (engine, _):
        async with engine.open_session() as good, engine.open_session() as bad:
            async with good.generate("What?", LONG, media=[PICTURE]) as generation:
                with pytest.raises(RequestRejected, match=r"media\[1\]: the toy model cannot") as caught:
                    await ask(bad, "What?", media=[OTHER, UNREADABLE])
                assert caught.value.code == "invalid_image"
                assert (await generation.result()).token_ids == reference(generation, PICTURE)
            assert bad.history == []


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
                assert len(engine.payloads.line) == 1
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
    assert len(engine.payloads.line) == 1
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
        assert len(engine.payloads.line) == 1
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
        while engine.sealing.value != 0:
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        session.end()
        await wait_all_tasks_blocked()
        assert engine.statistics().rejected == 1 and not simulation.memfds


@pytest.mark.parametrize("call", ["generate", "keep_images", "open_session"])
async def test_the_turn_to_copy_images_is_awaited_until_the_deadline(autojump_clock, call):
    async with engine_for_images() as (engine, _), engine.sealing:
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
            assert len(engine.payloads.line) == 2
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
            assert not len(engine.payloads.line)
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
