"""Images over trioengine.connect, with the same meaning as in a program that embeds the engine."""

import pytest
import trio
from helpers.clients import clients_of_a_loading_server, open_clients
from helpers.pictures import OTHER, PICTURE, content, data_url, png
from test_chat_images import ROOM, UNREADABLE

from trioengine import EngineConfig, RequestRejected, SamplingParams, connect
from trioengine.testing.simulation import IMAGE_LIMITS

FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class Drawing:
    """An image that writes itself, as PIL's do."""

    size = (12, 9)

    def save(self, fp, format):
        assert format == "PNG"
        fp.write(PICTURE)


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=IMAGE_LIMITS) as clients:
        yield clients


async def expected(clients, *messages):
    return (await clients.engine.generate(list(messages), FIVE)).text


def asked(*images, text="What?"):
    return {"role": "user", "content": content(*images, text=text)}


async def test_the_kinds_of_media(autojump_clock, remote, clients, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURE)
    answer = await expected(clients, asked(PICTURE))
    for media in (PICTURE, bytearray(PICTURE), memoryview(PICTURE), path, str(path), Drawing()):
        async with remote.open_session() as session:
            assert (await session.ask("What?", FIVE, media=[media])).text == answer
            assert session.history == [asked(PICTURE), {"role": "assistant", "content": answer}]
    assert (await remote.generate("What?", FIVE, media=[PICTURE])).text == answer
    message = {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What?"}]}
    assert (await remote.generate([message], FIVE)).text == answer


async def test_a_conversation_is_that_of_the_engine(autojump_clock, remote, clients):
    async with remote.open_session() as there, clients.engine.open_session() as here:
        for text, media in [("What?", [PICTURE, OTHER]), ("And?", []), ("Then?", [PICTURE])]:
            answers = [(await session.ask(text, FIVE, media=media)).text for session in (there, here)]
            assert answers[0] == answers[1]


async def test_a_history_with_images_is_given_to_another_session(autojump_clock, remote, clients):
    """As after the loss of a connection: the images are sent again."""
    async with remote.open_session() as session:
        await session.ask("What?", FIVE, media=[PICTURE])
        history = session.history
    async with remote.open_session(history=history) as session:
        assert (await session.ask("And?", FIVE)).text == await expected(
            clients, *history, {"role": "user", "content": "And?"}
        )


async def test_what_was_dropped_is_sent_again_with_the_history(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, payload_memory=ROOM)
    async with open_clients(config, IMAGE_LIMITS) as clients, connect("ws://localhost", dial=clients.dial) as remote:
        async with remote.open_session() as session:
            await session.ask("What?", FIVE, media=[PICTURE])
            await remote.generate("What?", FIVE, media=[OTHER])
            with pytest.raises(RequestRejected, match="the image is not kept any more") as caught:
                await session.ask("And?", FIVE)
            assert (caught.value.code, caught.value.param) == ("image_dropped", "history[0].content[0]")
            session.replace_history(session.history)
            assert (await session.ask("And?", FIVE)).finish_reason == "length"


@pytest.mark.parametrize(
    ("media", "code", "why"),
    [
        ([b"what"], "invalid_image_format", r"media\[0\]: not a PNG"),
        ([PICTURE, b"GIF89a"], "image_parse_error", r"media\[1\]: the GIF image is truncated"),
        (["/nowhere/picture.png"], "invalid_value", "No such file"),
        ([3], "invalid_value", "or an image with a method `save`, as PIL's have, got int"),
        (PICTURE, "invalid_value", "media must be a list, got bytes"),
        ([bytes(2 << 20)], "invalid_image_format", "not a PNG"),
        ([PICTURE + bytes(25 << 20)], "too_large", "is too large, the limit is 33554432"),
        ([PICTURE + bytes(21 << 20)], "image_file_too_large", "at most 20971520 are accepted"),
    ],
)
async def test_what_cannot_be_sent(autojump_clock, remote, clients, media, code, why):
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected, match=why) as caught:
            await session.ask("What?", FIVE, media=media)
        assert caught.value.code == code
        assert (await session.ask("What?", FIVE, media=[PICTURE])).text == await expected(clients, asked(PICTURE))


@pytest.mark.parametrize("size", [0, 2 << 20])
async def test_a_model_for_text(autojump_clock, size):
    """A message that is too large for its server is not sent."""
    async with open_clients() as clients, connect("ws://localhost", dial=clients.dial) as remote:
        async with remote.open_session() as session:
            with pytest.raises(RequestRejected, match=r"model.* takes no images; HuggingFaceTB/SmolVLM") as caught:
                await session.ask("What?", FIVE, media=[png(padding=size)])
            assert caught.value.code == "images_not_supported"
            assert caught.value.param == ("prompt" if size else "media[0]")
            assert (await session.ask("What?", FIVE)).finish_reason == "length"


async def test_an_image_that_cannot_be_decoded_is_named_by_the_arguments_of_the_call(autojump_clock, remote):
    async with remote.open_session() as session:
        await session.ask("What?", FIVE, media=[PICTURE])
        with pytest.raises(RequestRejected, match=r"media\[1\]: the toy model cannot read it") as caught:
            await session.ask("And?", FIVE, media=[PICTURE, UNREADABLE])
        assert (caught.value.code, caught.value.param) == ("invalid_image", "media[1]")
        with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content\[1\]: the toy model cannot read it"):
            parts = [{"type": "text", "text": "And?"}, {"type": "image", "image": UNREADABLE}]
            await session.ask([{"role": "user", "content": parts}], FIVE)


async def test_the_output_of_a_call_has_no_images(autojump_clock, remote):
    output = {"role": "tool", "content": "x", "tool_call_id": "c"}
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content cannot be sent: the output of a call"):
            await session.ask([output], FIVE, media=[PICTURE])


async def test_urls_are_not_fetched(autojump_clock, remote):
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected, match="only data: URLs are accepted"):
            await session.ask([{"role": "user", "content": [part]}], FIVE)
        part["image_url"]["url"] = data_url(PICTURE)
        assert (await session.ask([{"role": "user", "content": [part]}], FIVE)).text


async def test_a_session_opened_while_the_model_loads_sends_large_images_when_it_is_loaded(autojump_clock):
    states, told = trio.open_memory_channel(10)
    async with clients_of_a_loading_server(IMAGE_LIMITS) as (clients, found):
        async with connect("ws://localhost", dial=clients.dial, on_state=states.send_nowait) as client:
            async with client.open_session() as session:
                assert await told.receive() == "loading"
                found.set()
                assert await told.receive() == "awake"
                assert (await session.ask("What?", FIVE, media=[png(padding=2 << 20)])).text
