"""Conversations over the Realtime protocol, with a real WebSocket client, on the simulated engine."""

import trio
from helpers.clients import where_a_loss_fails
from helpers.realtime_texts import GREEDY, LONG, assistant, reference, text_of, user


async def test_an_answer_streams(autojump_clock, clients):
    async with clients.realtime() as client:
        response = await client.ask("hello", **GREEDY)
        deltas = [event["delta"] for event in client.events if event["type"] == "response.output_text.delta"]
        assert text_of(response) == "".join(deltas) == reference(clients, [user("hello")])
        assert len(deltas) > 1
        assert response["usage"]["output_tokens"] > 0
        assert response["usage"]["input_token_details"]["cached_tokens"] == 0


async def test_the_order_of_events_and_what_they_hold(autojump_clock, clients):
    async with clients.realtime() as client:
        response = await client.ask("hello", metadata={"mine": "1"}, **GREEDY)
        types = [event["type"] for event in client.events]
        num_deltas = types.count("response.output_text.delta")
        assert types == [
            "session.created",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * num_deltas,
            "response.output_text.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        by_type = {event["type"]: event for event in client.events}
        session = by_type["session.created"]["session"]
        assert (session["type"], session["object"], session["model"]) == ("realtime", "realtime.session", "toy")
        created = by_type["response.created"]["response"]
        assert (created["status"], created["output"], created["metadata"]) == ("in_progress", [], {"mine": "1"})
        assert response["id"] == created["id"] == by_type["response.output_text.delta"]["response_id"]
        item = by_type["response.output_item.done"]["item"]
        assert response["output"] == [item]
        assert by_type["response.output_text.done"]["text"] == item["content"][0]["text"]
        assert by_type["response.content_part.done"]["part"]["text"] == item["content"][0]["text"]
        assert by_type["conversation.item.done"]["previous_item_id"] == client.events[1]["item"]["id"]


async def test_the_second_turn_finds_the_first_in_the_cache(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        second = await client.ask("and then?", **GREEDY)
        messages = [user("hello"), assistant(text_of(first)), user("and then?")]
        assert text_of(second) == reference(clients, messages)
        first_tokens = first["usage"]["total_tokens"]
        assert second["usage"]["input_token_details"]["cached_tokens"] >= first_tokens // 4 * 4 - 4
        assert clients.engine.statistics().sessions == 1


async def test_a_cache_salt_is_a_setting(autojump_clock, clients):
    """Of the session or of one response; turns with another one are computed anew."""
    async with clients.realtime() as client:
        await client.send("session.update", session={"cache_salt": "mine"})
        assert (await client.until("session.updated"))["session"]["cache_salt"] == "mine"
        cached = []
        for options in ({}, {}, {"cache_salt": "yours"}, {"cache_salt": None}, {}):
            response = await client.ask("hello", **GREEDY, **options)
            cached.append(response["usage"]["input_token_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False, False, True]


async def test_an_item_in_progress_grows(autojump_clock, clients):
    """It is what has come until then, to who retrieves it and to who refers to it."""
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        place = (await client.until("response.content_part.added"))["item_id"]
        for _ in range(5):
            await client.until("response.output_text.delta")
        await client.send("conversation.item.retrieve", item_id=place)
        item = (await client.until("conversation.item.retrieved"))["item"]
        (part,) = item["content"]
        deltas = [event["delta"] for event in client.events if event["type"] == "response.output_text.delta"]
        assert (item["status"], part["text"], len(part["text"]) >= 5) == ("in_progress", "".join(deltas), True)
        entries = [{"type": "item_reference", "id": place}]
        await client.send("response.create", response={"conversation": "none", "input": entries, **GREEDY})
        created = (await client.until("response.created"))["response"]["id"]
        seen = "".join(event["delta"] for event in client.events if event["type"] == "response.output_text.delta")
        responses = [(await client.until("response.done"))["response"] for _ in range(2)]
        (aside,) = [response for response in responses if response["id"] == created]
        assert text_of(aside) == reference(clients, [assistant(seen)])


async def test_length_is_incomplete(autojump_clock, clients):
    async with clients.realtime() as client:
        response = await client.ask("hello", temperature=0, max_output_tokens=3, ignore_eos=True)
        assert (response["status"], response["max_output_tokens"]) == ("incomplete", 3)
        assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert response["usage"]["output_tokens"] == 3


async def test_a_stop_string_and_the_next_request_at_once(autojump_clock, clients):
    expected = reference(clients, [user("hello")])
    async with clients.realtime() as client:
        response = await client.ask("hello", stop=[expected[3:5]], **GREEDY)
        assert (response["status"], text_of(response)) == ("completed", expected[:3])
        following = await client.ask("more", **GREEDY)
        assert text_of(following) == reference(clients, [user("hello"), assistant(expected[:3]), user("more")])


async def test_cancel_keeps_what_was_sent(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
        await client.send("response.cancel")
        cancelled = (await client.until("response.done"))["response"]
        assert cancelled["status"] == "cancelled"
        assert cancelled["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        assert cancelled["output"][0]["status"] == "incomplete"
        partial = text_of(cancelled)
        whole = reference(clients, [user("hello")], 200, ignore_eos=True)
        assert 0 < len(partial) < len(whole)
        assert whole.startswith(partial)
        following = await client.ask("go on", **GREEDY)
        assert text_of(following) == reference(clients, [user("hello"), assistant(partial), user("go on")])
        await client.send("conversation.item.retrieve", item_id=cancelled["output"][0]["id"])
        retrieved = await client.until("conversation.item.retrieved")
        assert retrieved["item"] == cancelled["output"][0]


async def test_cancel_before_the_first_token(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.send("response.cancel")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "cancelled"
        following = await client.respond(**GREEDY)
        assert following["status"] == "completed"


async def test_cancel_with_nothing_active(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("response.cancel", event_id="mine")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "mine")
        response = await client.ask("hello", **GREEDY)
        assert response["status"] == "completed"
        await client.send("response.cancel", response_id=response["id"])
        assert (await client.until("error"))["error"]["code"] == "response_cancel_not_active"


async def test_a_second_response_is_refused_and_disturbs_nothing(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=GREEDY)
        await client.send("response.create", event_id="second", response=GREEDY)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "second")
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == reference(clients, [user("hello")])


async def test_instructions_of_the_session_and_of_a_response(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("session.update", session={"type": "realtime", "instructions": "be brief", **GREEDY})
        updated = (await client.until("session.updated"))["session"]
        assert (updated["instructions"], updated["max_output_tokens"]) == ("be brief", 40)
        first = await client.ask("hello")
        system = {"role": "system", "content": "be brief"}
        assert text_of(first) == reference(clients, [system, user("hello")])
        second = await client.respond(instructions="be long")
        other = {"role": "system", "content": "be long"}
        assert text_of(second) == reference(clients, [other, user("hello"), assistant(text_of(first))])


async def test_null_removes_a_setting(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("session.update", session={"instructions": "be brief", "temperature": 0})
        await client.send("session.update", session={"max_output_tokens": 40})
        for _ in range(2):
            session = (await client.until("session.updated"))["session"]
            assert (session["instructions"], session["temperature"]) == ("be brief", 0)
        response = await client.ask("hello", instructions=None)
        assert text_of(response) == reference(clients, [user("hello")])
        await client.send("session.update", session={"instructions": None, "temperature": None})
        session = (await client.until("session.updated"))["session"]
        assert (session["instructions"], "temperature" in session) == ("", False)


async def test_items_are_inserted_and_deleted(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("last", id="item_last")
        await client.say("first", id="item_first")
        await client.send("conversation.item.delete", item_id="item_first")
        assert (await client.until("conversation.item.deleted"))["item_id"] == "item_first"
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "zero"}]}
        await client.send("conversation.item.create", previous_item_id="root", item=item)
        assert (await client.until("conversation.item.done"))["previous_item_id"] is None
        response = await client.respond(**GREEDY)
        assert text_of(response) == reference(clients, [user("zero"), user("last")])


async def test_a_conversation_beyond_the_context_is_refused_before_it_is_taken_over(autojump_clock, clients):
    """By its length alone: what the engine's session holds stays, for the conversation that it still fits."""
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        (session,) = clients.engine.runtime.sessions
        item = {
            "id": "long",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "x" * 9999}],
        }
        await client.send("conversation.item.create", previous_item_id="root", item=item)
        refused = await client.respond(truncation="disabled", **GREEDY)
        assert refused["status_details"]["error"]["code"] == "context_length_exceeded"
        assert session.conversation.history == [user("hello"), assistant(text_of(first))]
        await client.send("conversation.item.delete", item_id="long")
        second = await client.ask("and then?", **GREEDY)
        messages = [user("hello"), assistant(text_of(first)), user("and then?")]
        assert text_of(second) == reference(clients, messages)


async def test_logit_bias_by_token_ids(autojump_clock, clients):
    async with clients.realtime() as client:
        response = await client.ask("hello", logit_bias={"0": 1, "258": -1}, **GREEDY)
        assert response["status"] != "failed"


@where_a_loss_fails
async def test_the_death_of_the_worker_fails_the_response_and_the_conversation_goes_on(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        await client.say("tell me")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
        clients.simulation.worker.exit(-9)
        assert (await client.until("error"))["error"]["code"] == "worker_lost"
        failed = (await client.until("response.done"))["response"]
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] == "worker_lost"
        partial = text_of(failed)
        await client.say("again")
        refused = await client.respond(**GREEDY)
        assert refused["status_details"]["error"]["code"] == "overloaded"
        error = next(event["error"] for event in reversed(client.events) if event["type"] == "error")
        assert (error["type"], error["retry_after"] > 0) == ("server_error", True)
        await clients.engine.ready()
        response = await client.respond(**GREEDY)
        messages = [user("hello"), assistant(text_of(first)), user("tell me"), assistant(partial), user("again")]
        assert text_of(response) == reference(clients, messages)


async def test_a_large_event_is_read_in_a_thread(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("x" * 100_000)
        assert (await client.until("conversation.item.done"))["item"]["content"][0]["text"] == "x" * 100_000


async def test_sessions_are_apart(autojump_clock, clients):
    async with clients.realtime() as one, clients.realtime() as other, trio.open_nursery() as nursery:
        texts = {}

        async def talk(client, name):
            texts[name] = text_of(await client.ask(name, **GREEDY))

        nursery.start_soon(talk, one, "one")
        nursery.start_soon(talk, other, "other")
    assert texts == {name: reference(clients, [user(name)]) for name in ("one", "other")}


async def test_the_model_may_be_named(autojump_clock, clients):
    async with clients.realtime(path="/v1/realtime?model=toy", subprotocols=["realtime", "x"]) as client:
        assert client.websocket.subprotocol == "realtime"
        assert client.events[0]["session"]["model"] == "toy"
