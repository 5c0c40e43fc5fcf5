"""Images in items of the Realtime protocol: kept as long as their item, shown without their bytes, given back once."""

import json

import pytest
import trio
from helpers.clients import clients_of_a_loading_server, open_clients
from helpers.pictures import OTHER, PICTURE, data_url, large_pieces, png, traced
from test_chat_images import ROOM, UNREADABLE
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, SamplingParams
from trioengine.core.image import VISION_MODEL
from trioengine.testing.simulation import IMAGE_LIMITS

GREEDY = {"temperature": 0, "max_output_tokens": 5, "ignore_eos": True}
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = {**GREEDY, "max_output_tokens": 300}
MIB = 1 << 20


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=IMAGE_LIMITS) as clients:
        yield clients


@pytest.fixture
async def narrow(autojump_clock):
    """A server that keeps one picture."""
    config = EngineConfig(model="toy", max_num_seqs=8, payload_memory=ROOM)
    async with open_clients(config, IMAGE_LIMITS) as clients:
        yield clients


def image(data=PICTURE, **fields):
    return {"type": "input_image", "image_url": data_url(data), **fields}


def item(*content, role="user", **fields):
    parts = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in content]
    return {"type": "message", "role": role, "content": parts, **fields}


async def create(client, *content, **fields):
    """Create an item, and return it as it is told."""
    await client.send("conversation.item.create", item=item(*content, **fields), event_id="mine")
    return (await client.until("conversation.item.done"))["item"]


def message(*content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


async def expected(clients, *messages):
    return (await clients.engine.generate(list(messages), FIVE)).text


def text_of(response):
    assert response["status"] == "incomplete", response
    return response["output"][0]["content"][0]["text"]


def error_in(events):
    """The only one."""
    (error,) = (event["error"] for event in events if event["type"] == "error")
    return error


def kept(clients):
    statistics = clients.engine.statistics()
    return statistics.payload_bytes_kept + statistics.payload_bytes_inflight


async def test_answers_depend_on_the_images(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, image(), "What?")
        first = text_of(await client.respond(**GREEDY))
        asked = message(image(), "What?")
        assert first == await expected(clients, asked)
        await create(client, "And ", image(OTHER, detail="low"))
        response = await client.respond(**GREEDY)
        answer = {"role": "assistant", "content": first}
        assert text_of(response) == await expected(clients, asked, answer, message("And ", image(OTHER)))
        assert response["usage"]["input_token_details"]["cached_tokens"] > 0
        assert kept(clients) == len(PICTURE) + len(OTHER)


async def test_an_item_is_shown_without_its_bytes(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, image(), "What?", id="mine")
        await client.send("conversation.item.retrieve", item_id="mine")
        retrieved = await client.until("conversation.item.retrieved")
        shown = [{"type": "input_image", "image_url": None}, {"type": "input_text", "text": "What?"}]
        events = [event for event in client.events if "item" in event]
        assert [event["type"].rpartition(".")[2] for event in events] == ["added", "done", "retrieved"]
        assert all(event["item"]["content"] == shown for event in events)
        assert retrieved["item"]["status"] == "completed"


async def test_an_item_of_an_image_alone_is_answered(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, image())
        assert text_of(await client.respond(**GREEDY)) == await expected(clients, message(image()))


async def test_a_deleted_item_gives_its_image_back(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, image(), id="first")
        await create(client, "hello")
        assert kept(clients) == len(PICTURE)
        await client.send("conversation.item.delete", item_id="first")
        await client.until("conversation.item.deleted")
        assert kept(clients) == 0
        assert text_of(await client.respond(**GREEDY)) == await expected(clients, message("hello"))


async def test_a_response_goes_on_when_its_item_is_deleted(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, image(), id="first")
        await client.send("response.create", response=GREEDY)
        await client.send("conversation.item.delete", item_id="first")
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == await expected(clients, message(image()))


async def test_images_in_the_input_of_a_response(autojump_clock, clients):
    """They are kept as long as the response; a reference is to an item with its image."""
    async with clients.realtime() as client:
        await create(client, image(), id="first")
        reference = {"type": "item_reference", "id": "first"}
        given = [reference, item("and", image(OTHER))]
        for conversation in ("none", "auto"):
            response = await client.respond(conversation=conversation, input=given, **GREEDY)
            asked = message(image()), message("and", image(OTHER))
            assert text_of(response) == await expected(clients, *asked)
        await client.send("conversation.item.delete", item_id="first")
        await client.until("conversation.item.deleted")
    await clients.all_closed()
    assert kept(clients) == 0


@pytest.mark.parametrize("leaves", [False, True])
async def test_images_of_a_response_that_waits_for_the_end_of_a_cancelled_one(autojump_clock, clients, leaves):
    """They are kept until it has ended, or its client has left."""
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={"max_output_tokens": 200, "ignore_eos": True})
        await client.until("response.output_text.delta")
        await client.send("response.cancel")
        await client.send("response.create", response={"input": [item("and", image())], **GREEDY})
        if not leaves:
            assert (await client.until("response.done"))["response"]["status"] == "cancelled"
            response = (await client.until("response.done"))["response"]
            assert text_of(response) == await expected(clients, message("and", image()))
    await clients.all_closed()
    assert kept(clients) == 0


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "code", "param"),
    [
        (image() | {"image_url": "https://example.org/a.png"}, "invalid_image_url", "content[1].image_url"),
        (image(b"BM"), "invalid_image_format", "content[1].image_url"),
        (image() | {"image_url": 3}, "invalid_type", "content[1].image_url"),
        (image(detail="sharp"), "invalid_value", "content[1].detail"),
        ({"type": "input_audio", "audio": ""}, "unsupported_content", "content[1].type"),
    ],
)
async def test_a_bad_image_is_an_error_event(autojump_clock, clients, part, code, param):
    async with clients.realtime() as client:
        await client.send("conversation.item.create", item=item("x", part), event_id="mine")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"], error["event_id"]) == (code, f"item.{param}", "mine")
        given = [item("x"), item("x", part)]
        await client.send("response.create", response={"input": given, **GREEDY}, event_id="asked")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == (code, f"response.input[1].{param}")
        assert text_of(await client.ask("hello", **GREEDY)) == await expected(clients, message("hello"))


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_are_in_user_items(autojump_clock, clients, role):
    async with clients.realtime() as client:
        await client.send("conversation.item.create", item=item(image(), role=role))
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_content", "item.content[0].type")


async def test_a_model_for_text_names_itself(autojump_clock):
    async with open_clients(EngineConfig(model="/models/secret"), served_model_name="shown") as clients:
        async with clients.realtime() as client:
            await client.send("conversation.item.create", item=item(image()))
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"]) == ("images_not_supported", "item.content[0].image_url")
            refusal = f"item.content[0].image_url: model 'shown' takes no images; {VISION_MODEL} does"
            assert error["message"] == refusal


async def test_a_refused_item_gives_its_image_back(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, "hello", id="first")
        await client.send("conversation.item.create", item=item(image(), id="first"))
        assert (await client.until("error"))["error"]["code"] == "duplicate_item"
        assert kept(clients) == 0


async def test_an_image_that_cannot_be_decoded_names_its_item(autojump_clock, clients):
    async with clients.realtime() as client:
        await create(client, "hello")
        await client.respond(**GREEDY)
        await create(client, "x", {"type": "input_image", "image_url": data_url(UNREADABLE, "image/jpeg")}, id="bad")
        response = await client.respond(**GREEDY)
        error = error_in(client.events)
        assert (response["status"], error["code"], error["param"]) == ("failed", "invalid_image", "bad")
        assert error["message"].startswith("item 'bad': content[1]: ")


async def test_a_dropped_image_names_its_item(autojump_clock, narrow):
    """Others needed the room; deleted and created again, the item is answered."""
    async with narrow.realtime() as client:
        await create(client, image(), id="first")
        await client.respond(**GREEDY)
        await narrow.engine.generate("What?", FIVE, media=[OTHER])
        await create(client, "And?")
        response = await client.respond(**GREEDY)
        error = error_in(client.events)
        assert (response["status"], error["code"], error["param"]) == ("failed", "image_dropped", "first")
        assert error["message"].startswith("item 'first': content[0]: the image is not kept any more")
        await client.send("conversation.item.delete", item_id="first")
        await client.send("conversation.item.create", item=item(image(), id="first"), previous_item_id="root")
        await client.until("conversation.item.done")
        assert (await client.respond(**GREEDY))["status"] == "incomplete"


# ---- room -----------------------------------------------------------------------------------------------------------


async def test_an_item_waits_for_room(autojump_clock, narrow):
    """And the events behind it wait, too."""
    async with narrow.engine.open_session() as session, narrow.realtime() as client:
        async with session.generate("What?", FIVE, media=[OTHER]):
            await client.send("conversation.item.create", item=item(image()))
            await client.send("response.create", response=GREEDY)
            response = (await client.until("response.done"))["response"]
        assert text_of(response) == await expected(narrow, message(image()))


async def test_an_item_does_not_wait_for_ever(autojump_clock, narrow):
    async with narrow.engine.open_session() as session, narrow.realtime() as client:
        narrow.simulation.worker.payloads.by_hand = True
        async with session.generate("What?", FIVE, media=[OTHER]) as generation:
            began = trio.current_time()
            await client.send("conversation.item.create", item=item(image()), event_id="mine")
            error = (await client.until("error"))["error"]
            assert trio.current_time() - began == pytest.approx(10, abs=0.1)
            assert (error["code"], error["type"], error["event_id"]) == ("overloaded", "rate_limit_error", "mine")
            assert error["retry_after"] == 1
            narrow.simulation.worker.payloads.by_hand = False
            narrow.simulation.worker.payloads.move()
            await generation.result()
        await create(client, image())
        assert (await client.respond(**GREEDY))["status"] == "incomplete"


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_a_client_that_leaves_at_any_moment(autojump_clock, clients, passes):
    """Its images are given back, whether they are being copied, kept, or on their way to the worker."""
    async with clients.realtime() as client:
        await client.send("conversation.item.create", item=item(image(), image(OTHER)))
        await client.send("response.create", response={"input": [item(image())], "conversation": "none", **LONG})
        await client.send("response.create", response=LONG)
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
    await clients.all_closed()
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()
    assert kept(clients) == 0


async def test_a_client_that_breaks_off(autojump_clock, clients):
    stream = clients.stream()
    with pytest.raises(BaseExceptionGroup):
        async with clients.realtime(stream) as client:
            await create(client, image())
            await client.send("response.create", response=LONG)
            await client.until("response.output_text.delta")
            await trio.aclose_forcefully(stream)
            await client.until("response.done")
    await clients.all_closed()
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()
    assert kept(clients) == 0


# ---- limits and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "most"), [(IMAGE_LIMITS, 32 * MIB), (None, MIB)], ids=["images", "text"])
async def test_messages_may_be_larger_for_images(autojump_clock, limits, most):
    async with open_clients(**({} if limits is None else {"limits": limits})) as clients:
        text = json.dumps({"type": "response.cancel"})
        async with clients.realtime(max_message_size=1 << 30) as client:
            await client.websocket.send_message(text.ljust(most))
            assert (await client.next())["error"]["code"] == "response_cancel_not_active"
            await client.websocket.send_message(text.ljust(most + 1))
            with pytest.raises(Exception, match="1009"):
                await client.next()


async def test_messages_may_be_larger_as_soon_as_the_model_is_known(autojump_clock):
    """On connections that were opened before, too."""
    async with clients_of_a_loading_server(IMAGE_LIMITS) as (clients, found):
        async with clients.realtime(max_message_size=1 << 30) as client:
            found.set()
            await clients.engine.ready()
            for size in (32 * MIB, 20 * MIB):
                await client.websocket.send_message(json.dumps({"type": "response.cancel"}).ljust(size))
                assert (await client.until("error"))["error"]["code"] == "response_cancel_not_active"


async def test_of_a_message_only_the_payload_is_left(autojump_clock, clients):
    data = png(padding=3 * MIB)
    async with clients.realtime() as client:
        with traced():
            await create(client, image(data))
            await wait_all_tasks_blocked()
            pieces = large_pieces()
            assert [size - len(data) < 100 for size, _ in pieces] == [True], pieces
            assert clients.server.budget.num_bytes < 10_000
            await client.send("conversation.item.create", item=item(image(b"BM" + data)))
            await client.until("error")
            await wait_all_tasks_blocked()
            pieces = large_pieces()
            assert len(pieces) == 1, pieces
            await client.respond(**GREEDY)
            await wait_all_tasks_blocked()
            assert len(large_pieces()) == 1
