"""A response.create right after a response.cancel begins when the cancelled response has ended."""

import pytest
import trio
from helpers.realtime_texts import GREEDY, LONG, assistant, reference, text_of, user

ACTIVE = "conversation_already_has_active_response"
ANSWERED = ("completed", "incomplete")
NAMES = ("response.created", "response.done", "error")


async def begin(client, text="hello"):
    """A long response whose text has begun; returns its id."""
    await client.say(text)
    await client.send("response.create", response=LONG)
    return (await client.until("response.output_text.delta"))["response_id"]


async def done(client):
    return (await client.until("response.done"))["response"]


async def ends_as_cancelled_and_answered(client):
    """The two responses; returns them."""
    first, second = await done(client), await done(client)
    assert first["status"] == "cancelled" and second["status"] in ANSWERED
    assert second["usage"]["output_tokens"] > 1
    return first, second


def order(client):
    """The events about responses, in their order."""
    return [event["type"] for event in client.events if event["type"] in NAMES]


async def test_it_begins_after_the_cancelled_one(autojump_clock, clients):
    """With the conversation at that time, which has the part of the answer that was sent."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", event_id="next", response={"metadata": {"mine": "1"}, **GREEDY})
        first, second = await ends_as_cancelled_and_answered(client)
        assert second["metadata"] == {"mine": "1"}
        assert text_of(second) == reference(clients, [user("hello"), assistant(text_of(first))])
        assert order(client) == ["response.created", "response.done"] * 2


async def test_before_the_first_token(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        await ends_as_cancelled_and_answered(client)


async def test_it_has_the_session_and_the_items_of_its_beginning(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin(client)
        await client.send("session.update", session={"instructions": "be"})
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        await client.send("session.update", session={"instructions": "no"})
        await client.say("more")
        first, second = await ends_as_cancelled_and_answered(client)
        messages = [{"role": "system", "content": "no"}, user("hello"), assistant(text_of(first)), user("more")]
        assert text_of(second) == reference(clients, messages)


async def test_one_is_remembered(autojump_clock, clients):
    """A second one is refused, and disturbs nothing; so is one before the cancel."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.create", event_id="early", response=GREEDY)
        await client.send("response.cancel")
        await client.send("response.create", event_id="next", response=GREEDY)
        await client.send("response.create", event_id="late", response=GREEDY)
        await ends_as_cancelled_and_answered(client)
        errors = [event["error"] for event in client.events if event["type"] == "error"]
        assert [(error["code"], error["event_id"]) for error in errors] == [(ACTIVE, "early"), (ACTIVE, "late")]


async def test_a_wrong_one_is_refused_at_once(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", event_id="wrong", response={"temperature": -1})
        await client.send("response.create", event_id="right", response=GREEDY)
        await ends_as_cancelled_and_answered(client)
        (error,) = [event["error"] for event in client.events if event["type"] == "error"]
        assert (error["code"], error["event_id"]) == ("invalid_value", "wrong")


async def test_one_that_cannot_begin_is_an_error_event(autojump_clock, clients):
    """At the end of the first; the connection goes on."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        entries = [{"type": "item_reference", "id": "none"}]
        await client.send("response.create", event_id="next", response={"input": entries, **GREEDY})
        assert (await done(client))["status"] == "cancelled"
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"], error["event_id"]) == ("item_not_found", "response.input[0].id", "next")
        assert (await client.respond(**GREEDY))["status"] in ANSWERED


async def test_a_further_cancel_is_for_the_remembered_one(autojump_clock, clients):
    """It has a response.created and a response.done of its own, after those of the first."""
    async with clients.realtime() as client:
        first = await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", response=LONG)
        await client.send("response.cancel")
        responses = [await done(client), await done(client)]
        assert [response["status"] for response in responses] == ["cancelled", "cancelled"]
        assert responses[0]["id"] == first
        assert order(client) == ["response.created", "response.done"] * 2
        assert (await client.respond(**GREEDY))["status"] in ANSWERED


async def test_a_cancel_by_id_is_not(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        await client.send("response.cancel", response_id=first)
        await ends_as_cancelled_and_answered(client)


async def test_an_operators_abort_of_the_first_begins_it(autojump_clock, clients):
    """The session of the engine may end meanwhile."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        await trio.testing.wait_all_tasks_blocked()
        clients.engine.abort_all()
        await ends_as_cancelled_and_answered(client)


async def test_the_end_of_the_session_of_the_first_begins_it_in_another(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin(client)
        (session,) = clients.engine.runtime.sessions
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        await trio.testing.wait_all_tasks_blocked()
        session.end()
        first, second = await ends_as_cancelled_and_answered(client)
        assert text_of(second) == reference(clients, [user("hello"), assistant(text_of(first))])


@pytest.mark.parametrize("how", ["close", "break off"])
async def test_a_disconnect_drops_it(autojump_clock, clients, how):
    """No request of it reaches the engine, and none of its bytes are kept."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        await client.send("response.create", response={"instructions": "x" * 1000, **GREEDY})
        if how == "close":
            await client.websocket.aclose()
        else:
            await trio.aclose_forcefully(client.websocket._stream)
    await clients.all_closed()
    assert clients.server.budget.num_bytes == 0
    assert clients.engine.statistics().received == 1


async def test_a_drain_refuses_it(autojump_clock, clients):
    async with clients.realtime() as client, trio.open_nursery() as nursery:
        await begin(client)
        nursery.start_soon(clients.server.drain)
        await trio.testing.wait_all_tasks_blocked()
        await client.send("response.cancel")
        await client.send("response.create", response=GREEDY)
        assert (await done(client))["status"] == "cancelled"
        refused = await done(client)
        assert (refused["status"], refused["status_details"]["error"]["code"]) == ("failed", "shutting_down")


async def test_it_counts_among_the_bytes_of_its_client(autojump_clock, clients, monkeypatch):
    """From its event to its beginning; one without room is refused at once."""
    async with clients.realtime() as client:
        await begin(client)
        await client.send("response.cancel")
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patch:
            patch.setattr(clients.server.budget, "_max_bytes", clients.server.budget.num_bytes + 500)
            for event_id, instructions in (("large", "x" * 600), ("small", "be")):
                settings = {"instructions": instructions, **GREEDY}
                await client.send("response.create", event_id=event_id, response=settings)
            await trio.testing.wait_all_tasks_blocked()
        first, second = await ends_as_cancelled_and_answered(client)
        (error,) = [event["error"] for event in client.events if event["type"] == "error"]
        assert (error["code"], error["event_id"]) == ("buffers_full", "large")
        messages = [{"role": "system", "content": "be"}, user("hello"), assistant(text_of(first))]
        assert text_of(second) == reference(clients, messages)
