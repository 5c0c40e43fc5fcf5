"""The package openai, unmodified, sends images: over chat completions and over Realtime."""

import openai
import pytest
import trio
from helpers.loopback import on_loopback
from helpers.pictures import OTHER, PICTURE, content, data_url, png
from test_realtime_packages import response_of, with_openai

from trioengine import SamplingParams
from trioengine.testing.simulation import IMAGE_LIMITS

FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
GREEDY = {"temperature": 0, "max_output_tokens": 5}
MIB = 1 << 20


async def expected(server, *messages, params=FIVE):
    return (await server.engine.generate(list(messages), params)).text


def user(*images, text="What?"):
    return {"role": "user", "content": content(*images, text=text)}


def item(*images):
    parts = [{"type": "input_image", "image_url": data_url(image), "detail": "high"} for image in images]
    return {"type": "message", "role": "user", "content": [*parts, {"type": "input_text", "text": "What?"}]}


async def with_chat(server, talk):
    def call():
        base_url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            return talk(client.chat.completions)

    return await trio.to_thread.run_sync(call)


async def test_chat_completions():
    options = {"model": "toy", "temperature": 0, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    large = png(value=3, padding=6 * MIB)

    def talk(completions):
        whole = completions.create(messages=[user(PICTURE, OTHER)], **options).choices[0].message.content
        stream = completions.create(messages=[user(large)], stream=True, **options)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(openai.BadRequestError) as caught:
            completions.create(messages=[user(b"BM")], **options)
        return whole, streamed, caught.value

    async with on_loopback(limits=IMAGE_LIMITS) as server:
        whole, streamed, refused = await with_chat(server, talk)
        assert whole == await expected(server, user(PICTURE, OTHER))
        assert streamed == await expected(server, user(large))
        assert (refused.code, refused.param) == ("invalid_image_format", "messages[0].content[0].image_url.url")


async def test_realtime():
    large = png(value=3, padding=3 * MIB)

    async def talk(connection):
        answers = []
        for image in (PICTURE, large):
            await connection.conversation.item.create(item=item(image))
            added = await connection.recv()
            while added.type != "conversation.item.added":
                added = await connection.recv()
            await connection.response.create(response={**GREEDY, "ignore_eos": True})
            answers.append(((await response_of(connection))[0], added.item.content))
        await connection.conversation.item.create(item=item(b"BM"))
        return answers, await connection.recv()

    async with on_loopback(limits=IMAGE_LIMITS) as server:
        ((first, shown), (second, _)), refused = await with_openai(server, talk)
        assert first == await expected(server, user(PICTURE))
        assert second == await expected(server, user(PICTURE), {"role": "assistant", "content": first}, user(large))
        assert [(part.type, part.image_url) for part in shown] == [("input_image", None), ("input_text", None)]
        assert (refused.error.code, refused.error.param) == ("invalid_image_format", "item.content[0].image_url")
