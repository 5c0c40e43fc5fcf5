"""Images over chat completions: answers, refusals that name the part, limits, and memory that is given back."""

import json

import pytest
import trio
from helpers.clients import CHAT, chat, open_clients
from helpers.pictures import OTHER, PICTURE, content, data_url, image_part, large_pieces, png, traced
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, SamplingParams
from trioengine.core.image import VISION_MODEL
from trioengine.testing.simulation import IMAGE_LIMITS

FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
MIB = 1 << 20
ROOM = len(PICTURE) + 50  # bytes, for one picture: of a data URL a few more are reserved
UNREADABLE = bytes.fromhex("ffd8 ffc0 000b 08 0009 000c 01 011100 ffda")  # in the simulated worker


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=IMAGE_LIMITS) as clients:
        yield clients


async def expected(clients, messages):
    return (await clients.engine.generate(messages, FIVE)).text


def text_of(answer):
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


async def test_an_answer_depends_on_the_image(autojump_clock, clients):
    answers = [text_of(await clients.chat(content(picture))) for picture in (PICTURE, OTHER)]
    assert len(set(answers)) == 2
    for answer, picture in zip(answers, (PICTURE, OTHER), strict=True):
        assert answer == await expected(clients, [{"role": "user", "content": content(picture)}])


async def test_images_in_several_messages(autojump_clock, clients):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": content(PICTURE, OTHER)},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {"role": "user", "content": [{"type": "text", "text": "and "}, image_part(OTHER)]},
    ]
    answer = await clients.chat(messages=messages)
    assert text_of(answer) == await expected(clients, messages)
    assert answer.json["usage"]["prompt_tokens"] > 3 * 12  # tokens of an image


async def test_details_are_hints(autojump_clock, clients):
    part = {"type": "image_url", "image_url": {"url": data_url(PICTURE), "detail": "low"}}
    assert text_of(await clients.chat([part])) == await expected(clients, [{"role": "user", "content": [part]}])


# ---- refusals -------------------------------------------------------------------------------------------------------

URL = "messages[0].content[1].image_url.url"
BAD = [
    ({"url": "https://example.org/a.png"}, "invalid_image_url", URL, "the server fetches nothing"),
    ({"url": "data:image/png;base64,!!!!"}, "invalid_base64_image", URL, "not base64"),
    ({"url": data_url(b"GIF89a", "image/gif")}, "image_parse_error", URL, "the GIF image is truncated"),
    ({"url": data_url(b"BM")}, "invalid_image_format", URL, "not a PNG, JPEG, WebP or GIF image"),
    ({"url": data_url(png(17_000, 1))}, "image_too_large", URL, "at most 16384 pixels a side"),
    ({"url": 3}, "invalid_type", URL, "must be a string"),
    ({}, "missing_parameter", URL, "is missing"),
    ("data:", "invalid_type", "messages[0].content[1].image_url", "must be an object"),
    ({"url": data_url(PICTURE), "detail": 3}, "invalid_type", "messages[0].content[1].image_url.detail", "must be"),
    ({"url": "", "size": 3}, "invalid_image_url", URL, "only data: URLs"),
]


@pytest.mark.parametrize(("image", "code", "param", "why"), BAD)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_image_names_its_part(autojump_clock, clients, image, code, param, why, stream):
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": image}]
    answer = await clients.chat(parts, stream=stream)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert answer.error["message"].startswith(param)
    assert why in answer.error["message"]


async def test_an_image_that_cannot_be_decoded(autojump_clock, clients):
    """Only the worker finds that."""
    part = {"type": "image_url", "image_url": {"url": data_url(UNREADABLE, "image/jpeg")}}
    answer = await clients.chat([{"type": "text", "text": "What?"}, part])
    assert (answer.status, answer.error["code"]) == (400, "invalid_image")
    assert answer.error["message"].startswith("messages[0].content[1]: ")


async def test_images_are_in_user_messages(autojump_clock, clients):
    answer = await clients.chat(messages=[{"role": "system", "content": [image_part()]}])
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["message"] == 'messages[0].content[0].type must be "text", got "image_url"'


async def test_a_model_for_text_names_itself(autojump_clock):
    async with open_clients(EngineConfig(model="/models/secret"), served_model_name="shown") as clients:
        answer = await clients.chat(content(PICTURE), model="shown")
        assert (answer.status, answer.error["code"]) == (400, "images_not_supported")
        assert answer.error["message"] == f"messages[0].content[0]: model 'shown' takes no images; {VISION_MODEL} does"
        assert answer.error["param"] == "messages[0].content[0]"


async def test_a_full_budget_is_told_with_a_time(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, payload_memory=ROOM)
    async with open_clients(config, IMAGE_LIMITS) as clients:
        async with clients.engine.open_session() as session:
            async with session.generate("What?", FIVE, media=[PICTURE]):
                answer = await clients.chat(content(OTHER))
                assert (answer.status, answer.error["code"], answer.error["type"]) == (
                    429,
                    "overloaded",
                    "rate_limit_error",
                )
                assert answer.headers["retry-after"] == "1"
        answer = await clients.chat(content(PICTURE, OTHER))
        assert (answer.status, answer.error["code"]) == (413, "too_large")


async def test_an_image_that_is_dropped_before_a_worker_dies(autojump_clock):
    """The request cannot go on; the client may send it again, as the package openai does at this status."""
    config = EngineConfig(model="toy", max_num_seqs=8, payload_memory=ROOM)
    async with open_clients(config, IMAGE_LIMITS) as clients:
        answers = []
        async with trio.open_nursery() as nursery:

            async def ask():
                answers.append(await clients.chat(content(PICTURE), max_tokens=300))

            nursery.start_soon(ask)
            await trio.sleep(0.1)
            await clients.engine.generate("What?", FIVE, media=[OTHER])
            clients.simulation.worker.kill()
        (answer,) = answers
        assert (answer.status, answer.error["code"]) == (409, "image_dropped")
        assert answer.error["param"] == "messages[0].content[0]"


async def test_tokenize_is_for_text(autojump_clock, clients):
    messages = [{"role": "user", "content": content(PICTURE)}]
    answer = await clients.request("POST", "/tokenize", {"messages": messages})
    assert (answer.status, answer.error["code"]) == (400, "images_not_supported")


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "most"), [({}, 32 * MIB), ({"max_body_size": 100_000}, 100_000)])
async def test_bodies_may_be_larger_for_images(autojump_clock, limits, most):
    async with open_clients(limits=IMAGE_LIMITS, **limits) as clients:
        body = json.dumps(chat()).encode()
        assert (await clients.request("POST", CHAT, body.ljust(most))).status == 200
        refused = await clients.request("POST", CHAT, body.ljust(most + 1))
        assert (refused.status, refused.error["message"]) == (413, f"the body is larger than {most} bytes")


async def test_bodies_to_a_model_for_text(autojump_clock):
    async with open_clients() as clients:
        body = json.dumps(chat()).encode()
        assert (await clients.request("POST", CHAT, body.ljust(4 * MIB))).status == 200
        assert (await clients.request("POST", CHAT, body.ljust(4 * MIB + 1))).status == 413


# ---- memory ---------------------------------------------------------------------------------------------------------


async def test_the_body_is_gone_before_the_first_token(autojump_clock, clients):
    """Neither the body nor its JSON, its URL or the decoded bytes: of the image only the payload is left."""
    image = png(padding=3 * MIB)
    async with clients.connect() as client:
        with traced():
            await client.send("POST", CHAT, chat(content(image), max_tokens=400, stream=True))
            await client.head()
            pieces = large_pieces()
        assert [size - len(image) < 100 for size, _ in pieces] == [True], pieces
        assert clients.server.budget.num_bytes == 0
        await client.rest()


@pytest.mark.parametrize("image", [b"BM" + bytes(3 * MIB), b"GIF89a" + bytes(3 * MIB)], ids=["format", "header"])
@pytest.mark.parametrize("bad", [False, True])
async def test_of_a_refused_image_nothing_is_left(autojump_clock, clients, image, bad):
    """No cycle keeps it until the next collection."""
    url = data_url(image) + ("!!!!" if bad else "")
    async with clients.connect() as client:
        with traced():
            await client.send("POST", CHAT, chat([{"type": "image_url", "image_url": {"url": url}}]))
            url = None
            assert (await client.answer()).status == 400
            await wait_all_tasks_blocked()
            pieces = large_pieces()
        assert [size for size, _ in pieces] == [], pieces
