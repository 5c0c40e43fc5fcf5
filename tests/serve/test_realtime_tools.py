"""Tools over WebSocket: calls in answers, in the conversation, and cancelled."""

import json

import pytest
from helpers.clients import open_clients
from helpers.realtime_texts import reference, user
from helpers.realtime_tools import (
    CALLED,
    CLOCK,
    FORCED,
    LONG,
    NAMED,
    ROOM,
    WEATHER,
    add,
    clients_of_a_template,
    error_of,
    function,
    kinds,
    output_of,
    user_item,
)


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=ROOM) as clients:
        yield clients


async def test_a_forced_call(autojump_clock, clients):
    async with clients.realtime() as client:
        await add(client, {"role": "user", "content": [{"type": "input_text", "text": "hello"}]})
        start = len(client.events)
        response = await client.respond(**FORCED)
        events = client.events[start:]
        assert kinds(events) == CALLED
        assert (response["status"], response["status_details"]) == ("completed", None)
        (call,) = response["output"]
        assert call.keys() == {"id", "object", "type", "status", "name", "call_id", "arguments"}
        assert (call["type"], call["status"], call["name"]) == ("function_call", "completed", "weather")
        assert call["call_id"].startswith("call_") and json.loads(call["arguments"])["days"] in (1, 2)
        deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert len(deltas) > 5 and "".join(event["delta"] for event in deltas) == call["arguments"]
        place = {"response_id": response["id"], "item_id": call["id"], "output_index": 0, "call_id": call["call_id"]}
        (done,) = (event for event in events if event["type"] == "response.function_call_arguments.done")
        for event in (*deltas, done):
            assert place.items() <= event.items() and "content_index" not in event
        assert (done["name"], done["arguments"]) == ("weather", call["arguments"])
        added = next(event for event in events if event["type"] == "response.output_item.added")
        assert added["item"] == {**call, "arguments": "", "status": "in_progress"}
        await client.send("conversation.item.retrieve", item_id=call["id"])
        assert (await client.until("conversation.item.retrieved"))["item"] == call


async def test_the_conversation_goes_on_after_a_call(autojump_clock, clients):
    """The model sees what a chat completion shows it."""
    async with clients.realtime() as client:
        settings = {"instructions": "be kind", "tools": [WEATHER, CLOCK], "tool_choice": NAMED}
        await client.send("session.update", session=settings)
        shown = (await client.until("session.updated"))["session"]
        assert {name: shown[name] for name in settings} == settings
        response = await client.ask("hello", **LONG)
        (call,) = response["output"]
        item = await add(client, output_of(call, "sunny"))
        assert item == {**output_of(call, "sunny"), "id": item["id"], "object": "realtime.item", "status": "completed"}
        following = await client.respond(tool_choice="auto", **LONG)
    called = {
        "id": call["call_id"],
        "type": "function",
        "function": {name: call[name] for name in ("name", "arguments")},
    }
    messages = [
        {"role": "system", "content": "be kind"},
        user("hello"),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"},
    ]
    answer = await clients.chat(
        messages=messages, tools=[function(WEATHER), function(CLOCK)], max_tokens=200, ignore_eos=False
    )
    (message,) = following["output"]
    assert message["content"][0]["text"] == answer.json["choices"][0]["message"]["content"]
    assert following["usage"]["input_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert following["usage"]["input_token_details"]["cached_tokens"] > 0


async def test_a_template_that_prints_tools(autojump_clock):
    """It gets the tools of each response, and calls as members of the message before them."""
    async with clients_of_a_template() as clients, clients.realtime() as client:
        await client.say("hello")
        made = {"type": "function_call", "name": "clock", "arguments": '{"at": [1]}', "call_id": "c1"}
        await client.send("conversation.item.create", item=made)
        await add(client, {"type": "function_call_output", "call_id": "c1", "output": "noon"})
        call = {"type": "function", "id": "c1", "function": {"name": "clock", "arguments": '{"at": [1]}'}}
        messages = [
            user("hello"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ]
        lengths = []
        for tools in ([CLOCK], [WEATHER, CLOCK], [], [CLOCK]):
            await client.send("session.update", session={"tools": tools})
            response = await client.respond(**LONG)
            given = {"tools": [function(tool) for tool in tools]} if tools else {}
            answer = await clients.chat(messages=messages, max_tokens=200, ignore_eos=False, **given)
            assert answer.status == 200, answer.json
            text = answer.json["choices"][0]["message"]["content"]
            assert response["output"][0]["content"][0]["text"] == text
            assert response["usage"]["input_tokens"] == answer.json["usage"]["prompt_tokens"]
            messages.append({"role": "assistant", "content": text})
            lengths.append(response["usage"]["input_tokens"])
        assert lengths[1] - lengths[0] > len(json.dumps(function(WEATHER))) > lengths[0] - lengths[2]


async def test_items_of_a_call_made_up_by_the_client(autojump_clock, clients):
    """A call belongs to the assistant's message before it, as in a chat."""
    async with clients.realtime() as client:
        for role, text in (("user", "a"), ("assistant", "I look.")):
            await client.say(text, role=role)
            await client.until("conversation.item.done")
        made = {"type": "function_call", "name": "clock", "arguments": "{}"}
        call = await add(client, {**made, "id": "mine", "call_id": "c1"}, previous_item_id=None)
        assert call == {**made, "id": "mine", "call_id": "c1", "object": "realtime.item", "status": "completed"}
        await add(client, {**made, "call_id": "c2"})
        for id in ("c1", "c2"):
            await add(client, {"type": "function_call_output", "call_id": id, "output": "noon"})
        response = await client.respond(tools=[CLOCK], **LONG)
        alone = await client.respond(
            tools=[CLOCK], input=[{**made}, {"type": "item_reference", "id": "mine"}], conversation="none", **LONG
        )
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    messages = [
        user("a"),
        {"role": "assistant", "content": f"I look.\n{text}\n{text}"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "noon"},
    ]
    for each, told in ((response, messages), (alone, [{"role": "assistant", "content": f"{text}\n{text}"}])):
        answer = await clients.chat(messages=told, tools=[function(CLOCK)], max_tokens=200, ignore_eos=False)
        assert each["usage"]["input_tokens"] == answer.json["usage"]["prompt_tokens"]
        assert each["output"][0]["content"][0]["text"] == answer.json["choices"][0]["message"]["content"]


async def test_an_answer_without_calls_is_one_message(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        hidden = await client.respond(tools=[WEATHER], tool_choice="none", temperature=0, max_output_tokens=40)
        assert hidden["output"][0]["content"][0]["text"] == reference(clients, [user("hello")])
        start = len(client.events)
        response = await client.respond(tools=[WEATHER], **LONG)
        (message,) = response["output"]
        events = client.events[start:]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert message["type"] == "message" and message["content"][0]["text"] == "".join(deltas)
        assert kinds(events)[:4] == [*CALLED[:3], "response.content_part.added"]


async def test_several_calls(autojump_clock, clients):
    """Forced ones of a choice that allows several; each is an item of its own, with its own index."""
    async with clients.realtime() as client:
        await client.say("hello")
        response = await client.respond(tools=[CLOCK], tool_choice="required", min_tokens=70, **LONG)
        calls = response["output"]
        assert len(calls) > 1 and {call["name"] for call in calls} == {"clock"}
        assert len({call["id"] for call in calls}) == len({call["call_id"] for call in calls}) == len(calls)
        added = [event for event in client.events if event["type"] == "response.output_item.added"]
        assert [event["output_index"] for event in added] == list(range(len(calls)))
        before = [event["previous_item_id"] for event in client.events if event["type"] == "conversation.item.done"]
        assert before[2:] == [call["id"] for call in calls[:-1]]
        single = await client.respond(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, **LONG)
        assert len(single["output"]) == 1


async def test_a_call_out_of_band(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.until("conversation.item.done")
        start = len(client.events)
        response = await client.respond(conversation="none", **FORCED)
        of_response = [kind for kind in CALLED if not kind.startswith("conversation.")]
        assert kinds(client.events[start:]) == of_response
        (call,) = response["output"]
        assert await error_of(client, "conversation.item.retrieve", item_id=call["id"]) == ("item_not_found", "item_id")


async def test_another_form_of_calls(autojump_clock):
    async with open_clients(limits=ROOM, tool_call_parser="json") as clients, clients.realtime() as client:
        await client.say("hello")
        (call,) = (await client.respond(**FORCED))["output"]
        assert (call["type"], call["name"]) == ("function_call", "weather")


async def test_a_remembered_response_has_its_own_tools(autojump_clock, clients):
    """Its tools are counted until it begins."""
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={"max_output_tokens": 200, "ignore_eos": True})
        await client.until("response.output_text.delta")
        await client.send("response.cancel")
        await client.send("response.create", response={**FORCED, "tools": [WEATHER, CLOCK]})
        await client.until("response.done")
        (call,) = (await client.until("response.done"))["response"]["output"]
        assert (call["type"], call["name"]) == ("function_call", "weather")


async def test_calls_are_left_out_with_their_turn(autojump_clock):
    """A turn has the messages, calls and outputs up to the next message of the user."""
    async with open_clients() as clients, clients.realtime() as client:
        ids = []
        call = {"type": "function_call", "name": "clock", "arguments": "{}", "call_id": "c"}
        for item in (user_item("x" * 200), call, call, {"type": "function_call_output", "call_id": "c", "output": "y"}):
            ids.append((await add(client, item))["id"])
        await add(client, user_item("z" * 250))
        response = await client.respond(temperature=0, max_output_tokens=40)
        assert (response["dropped_turns"], response["dropped_item_ids"]) == (1, ids)
        assert response["status"] in ("completed", "incomplete")
        await client.send("session.update", session={"truncation": "disabled"})
        assert (await client.respond(temperature=0))["status_details"]["error"]["code"] == "context_length_exceeded"


async def test_arguments_that_are_nested_too_deeply(autojump_clock):
    """The response fails, and the conversation goes on without the call."""
    async with clients_of_a_template() as clients, clients.realtime() as client:
        arguments = '{"a": ' + "[" * 62 + "]" * 62 + "}"
        await add(client, {"type": "function_call", "name": "clock", "arguments": arguments, "id": "deep"})
        await add(client, user_item("hello"))
        response = await client.respond(temperature=0, max_output_tokens=5)
        error = response["status_details"]["error"]
        assert (response["status"], error["code"]) == ("failed", "invalid_value")
        assert error["message"].startswith("item 'deep': tool_calls[0].function.arguments.a")
        await client.send("conversation.item.delete", item_id="deep")
        assert (await client.respond(temperature=0, max_output_tokens=5))["status"] in ("completed", "incomplete")


async def test_a_response_cancelled_in_a_call(autojump_clock, clients):
    """The call is incomplete, and later prompts leave it out."""
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=FORCED)
        await client.until("response.function_call_arguments.delta")
        start = len(client.events)
        await client.send("response.cancel")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "cancelled"
        (call,) = response["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])
        assert kinds(client.events[start:])[-4:] == CALLED[-4:]
        following = await client.respond(temperature=0, max_output_tokens=40)
        assert following["output"][0]["content"][0]["text"] == reference(clients, [user("hello")])


async def test_a_call_cut_by_the_number_of_tokens(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        response = await client.respond(**{**FORCED, "max_output_tokens": 60})
        (call,) = response["output"]
        assert (response["status"], call["status"]) == ("incomplete", "incomplete")
        none = await client.respond(**{**FORCED, "max_output_tokens": 1})
        (message,) = none["output"]
        assert (message["type"], message["status"]) == ("message", "incomplete")
