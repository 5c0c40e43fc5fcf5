"""Images in requests: right answers, and refusals."""

import base64
import os
from functools import partial

import pytest
from helpers.image_sessions import (
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
from helpers.pictures import png

from trioengine import EngineOverloaded, RequestRejected
from trioengine.actors.media import source_of
from trioengine.client.prompt import image_part
from trioengine.core.types import FinishReason
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import SealFailure
from trioengine.testing.toy_model import DamagedPicture, ToyPicture

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
