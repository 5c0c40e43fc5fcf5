"""docs/trioengine.mjs sends images, and sends them again after a loss of the connection."""

from pathlib import Path

import trio
from helpers.loopback import on_loopback
from helpers.pictures import OTHER, PICTURE, content, data_url
from helpers.realtime_texts import assistant, user
from test_javascript import in_node

from trioengine import SamplingParams
from trioengine.testing.simulation import IMAGE_LIMITS

PROGRAM = Path(__file__).with_name("javascript_images.mjs")
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


async def test_images_in_node():
    async with on_loopback(limits=IMAGE_LIMITS) as server:
        url = f"http://127.0.0.1:{server.port}"
        results = await trio.to_thread.run_sync(in_node, PROGRAM, url, data_url(PICTURE), data_url(OTHER))

        async def answer(*messages):
            return (await server.engine.generate(list(messages), FIVE)).text

        first = {"role": "user", "content": content(PICTURE)}
        second = {"role": "user", "content": content(PICTURE, OTHER, text="And?")}
        history = [first, assistant(await answer(first)), second]
        history.append(assistant(await answer(*history)))
        after = await answer(*history, user("Then?"))
        alone = [*history, user("Then?"), assistant(after), {"role": "user", "content": content(PICTURE)[:1]}]
        assert results == {
            "answers": [history[1]["content"], history[3]["content"]],
            "refused": ["invalid_image_format", "item.content[0].image_url"],
            "strange": ["invalid_value", "media[0]"],
            "history": history,
            "after": after,
            "alone": await answer(*alone),
            "again": after,
            "connections": 2,
        }
