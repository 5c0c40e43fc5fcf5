"""Responses that belong to no conversation: they run beside it, and leave nothing in it."""

import pytest
import trio
from helpers.realtime_texts import GREEDY, LONG, assistant, reference, text_of, user

from trioengine.core.types import Cause
from trioengine.serve.realtime.response import MAX_OUT_OF_BAND

NONE = {"conversation": "none"}
WHOLE = {**GREEDY, "ignore_eos": True}  # however it goes, of the same length


def item(text, role="user"):
    part = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": part, "text": text}]}


async def done(client, count):
    """So many whole responses, by their id."""
    responses = [(await client.until("response.done"))["response"] for _ in range(count)]
    return {response["id"]: response for response in responses}


async def test_it_goes_on_from_the_conversation_and_adds_nothing(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        events = len(client.events)
        aside = await client.respond(instructions="be brief", metadata={"for": "me"}, **NONE, **GREEDY)
        told = client.events[events + 2 :]
        assert [event["type"] for event in told if event["type"] != "response.output_text.delta"] == [
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        assert (aside["status"], aside["conversation_id"], aside["metadata"]) == ("completed", None, {"for": "me"})
        system = {"role": "system", "content": "be brief"}
        assert text_of(aside) == reference(clients, [system, user("hello")])
        assert aside["usage"]["output_tokens"] > 0
        main = await client.respond(**GREEDY)
        assert text_of(main) == reference(clients, [user("hello")])
        assert main["conversation_id"] is not None
        await client.send("conversation.item.retrieve", item_id=aside["output"][0]["id"])
        assert (await client.until("error"))["error"]["code"] == "item_not_found"


async def test_its_own_input(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        (said,) = first["output"]
        entries = [item("sum up"), {"type": "item_reference", "id": said["id"]}, item("now")]
        aside = await client.respond(input=entries, **NONE, **GREEDY)
        messages = [user("sum up"), assistant(text_of(first)), user("now")]
        assert text_of(aside) == reference(clients, messages)
        assert (await client.respond(input=[], instructions="alone", **NONE, **GREEDY))["status"] == "completed"


async def test_an_input_of_the_conversations_own_response(autojump_clock, clients):
    """It replaces what the response goes on from; its answer is added to the conversation."""
    async with clients.realtime() as client:
        await client.say("hello")
        response = await client.respond(input=[item("other")], **GREEDY)
        assert text_of(response) == reference(clients, [user("other")])
        following = await client.ask("more", **GREEDY)
        assert text_of(following) == reference(clients, [user("hello"), assistant(text_of(response)), user("more")])


async def test_several_run_at_once_beside_the_conversation(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        names = [f"part {number}" for number in range(MAX_OUT_OF_BAND)]
        for name in names:
            response = {"input": [item(name)], "metadata": {"name": name}, **NONE, **WHOLE}
            await client.send("response.create", response=response)
        await client.send("response.create", response={"metadata": {"name": "hello"}, **WHOLE})
        await client.send("response.create", event_id="too many", response={**NONE, **GREEDY})
        responses = await done(client, MAX_OUT_OF_BAND + 1)
        texts = {response["metadata"]["name"]: text_of(response) for response in responses.values()}
        assert texts == {name: reference(clients, [user(name)], ignore_eos=True) for name in (*names, "hello")}
        (error,) = (event["error"] for event in client.events if event["type"] == "error")
        assert (error["code"], error["param"], error["event_id"]) == (
            "too_many_responses",
            "response.conversation",
            "too many",
        )
        begun = [event["type"] for event in client.events].index("response.done")
        created = [event["type"] for event in client.events[:begun]].count("response.created")
        assert created == MAX_OUT_OF_BAND + 1
        assert (await client.respond(**NONE, **WHOLE))["status"] == "incomplete"


async def test_deltas_are_told_apart_by_their_response(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        for settings in (GREEDY, {**NONE, "instructions": "aside", **GREEDY}):
            await client.send("response.create", response=settings)
        responses = await done(client, 2)
        for id, response in responses.items():
            of_it = [event for event in client.events if event.get("response_id") == id]
            deltas = [event["delta"] for event in of_it if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == text_of(response)


async def test_one_is_cancelled_by_its_id(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={**NONE, **LONG})
        aside = (await client.until("response.created"))["response"]
        await client.send("response.create", response=GREEDY)
        main = (await client.until("response.created"))["response"]
        await client.until("response.output_text.delta")
        await client.send("response.cancel", response_id=aside["id"])
        responses = await done(client, 2)
        assert responses[aside["id"]]["status"] == "cancelled"
        assert responses[aside["id"]]["output"][0]["status"] == "incomplete"
        assert text_of(responses[main["id"]]) == reference(clients, [user("hello")])


async def test_a_cancel_without_an_id_is_for_the_conversation(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={**NONE, **LONG})
        await client.send("response.cancel")
        assert (await client.until("error"))["error"]["code"] == "response_cancel_not_active"
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == reference(clients, [user("hello")], 200, ignore_eos=True)


@pytest.mark.parametrize("rounds", [0, 3])
async def test_all_end_with_the_connection(autojump_clock, clients, rounds):
    """Whether they have begun or not: their sessions end, by the disconnect."""
    async with clients.realtime() as client:
        await client.say("hello")
        for settings in (LONG, {**NONE, **LONG}, {**NONE, **LONG}):
            await client.send("response.create", response=settings)
        for _ in range(rounds):
            await client.until("response.output_text.delta")
        sessions = list(clients.engine.runtime.sessions)
        assert len(sessions) == 3 or not rounds
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()
    assert {session.end_cause for session in sessions} <= {Cause.DISCONNECT}
    assert clients.engine.statistics().finished == 0


async def test_the_sessions_slot_is_free_when_it_is_done(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.respond(input=[item("hello")], **NONE, **GREEDY)
        while clients.engine.statistics().sessions:
            await clients.engine.runtime.gate.changed()
        await clients.engine.check_invariants()


async def test_one_fails_alone(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={"input": [item("x" * 9999)], "metadata": {"n": "1"}, **NONE})
        await client.send("response.create", response={"metadata": {"n": "2"}, **GREEDY})
        responses = {response["metadata"]["n"]: response for response in (await done(client, 2)).values()}
        failed = responses["1"]["status_details"]["error"]
        assert (failed["code"], responses["2"]["status"]) == ("context_length_exceeded", "completed")


async def test_a_drain_lets_them_finish(autojump_clock, clients):
    async with clients.realtime() as client, trio.open_nursery() as nursery:
        await client.say("hello")
        await client.send("response.create", response={**NONE, **LONG})
        await client.until("response.output_text.delta")
        nursery.start_soon(clients.server.drain)
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "incomplete"
        assert text_of(response) == reference(clients, [user("hello")], 200, ignore_eos=True)
