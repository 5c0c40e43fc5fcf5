"""Clients of others, unmodified, over a socket: the realtime connection of openai, and websockets."""

import asyncio
import json
from types import SimpleNamespace

import openai
import pydantic
import pytest
import trio
import websockets
from helpers.loopback import on_loopback
from helpers.realtime_texts import assistant, reference, user
from openai.types.realtime import RealtimeServerEvent

from trioengine import RequestRejected, SamplingParams, connect

GREEDY = {"temperature": 0, "max_output_tokens": 40}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "additionalProperties": False}}


async def with_openai(server, talk, **options):
    """Call `talk` with the package's connection, under asyncio in a thread, which is waited for."""

    async def call():
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            async with client.realtime.connect(**{"model": "toy", **options}) as connection:
                return await talk(connection)

    return await trio.to_thread.run_sync(asyncio.run, call())


def say(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def response_of(connection):
    """The next whole response, and the deltas on the way."""
    text = ""
    async for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.done":
            return text, event.response
    raise AssertionError("the connection is over")


def expected(server, messages, **options):
    return reference(SimpleNamespace(engine=server.engine), messages, **options)


async def test_a_conversation_with_the_package_openai():
    async def talk(connection):
        await connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "instructions": "be"}
        )
        answers = []
        for question in ("hello", "and then?"):
            await connection.conversation.item.create(item=say(question))
            await connection.response.create(response=GREEDY)
            answers.append(await response_of(connection))
        return answers

    async with on_loopback() as server:
        (first, response), (second, following) = await with_openai(server, talk)
        history = [{"role": "system", "content": "be"}, user("hello")]
        assert first == expected(server, history)
        assert (response.status, response.output[0].content[0].text) == ("completed", first)
        assert second == expected(server, [*history, assistant(first), user("and then?")])
        assert following.usage.input_token_details.cached_tokens > 0
        assert following.usage.total_tokens == following.usage.input_tokens + following.usage.output_tokens


async def test_a_long_conversation_with_the_package_openai():
    """It goes on, as at OpenAI, unless truncation is disabled."""
    long = "which is rather long, so that only a few of its kind fit in the context of the model"

    async def talk(connection):
        dropped = []
        for number in range(6):
            await connection.conversation.item.create(item=say(f"question {number}, {long}"))
            await connection.response.create(response=GREEDY)
            dropped.append((await response_of(connection))[1].dropped_turns)
        await connection.session.update(session={"type": "realtime", "truncation": "disabled"})
        updated = await connection.recv()
        await connection.response.create(response=GREEDY)
        return dropped, updated.session.truncation, (await response_of(connection))[1].status

    async with on_loopback() as server:
        dropped, truncation, status = await with_openai(server, talk)
        assert dropped[0] == 0 and dropped[-1] > 0
        assert (truncation, status) == ("disabled", "failed")


async def test_the_package_openai_and_an_engine_that_sleeps():
    """It has no name for the events about that, and hands them on; its conversation is as it was."""

    async def talk(connection):
        await connection.conversation.item.create(item=say("hello"))
        await connection.response.create(response=GREEDY)
        first, _ = await response_of(connection)
        trio.from_thread.run(server.engine.sleep, trio_token=token)
        told = await connection.recv()
        await connection.response.create(response=GREEDY)
        _, refused = await response_of(connection)
        trio.from_thread.run(server.engine.wake, trio_token=token)
        await connection.conversation.item.create(item=say("and then?"))
        await connection.response.create(response=GREEDY)
        return first, told, refused, (await response_of(connection))[0]

    async with on_loopback() as server:
        token = trio.lowlevel.current_trio_token()
        first, told, refused, second = await with_openai(server, talk)
        assert (told.type, told.state) == ("engine.state", "sleeping")
        assert (refused.status, refused.status_details.error.code) == ("failed", "asleep")
        assert second == expected(server, [user("hello"), assistant(first), user("and then?")])


async def test_tools_with_the_package_openai():
    """A call, its output, and the answer that follows: the prompt is the chat completion's."""

    async def talk(connection):
        session = {"type": "realtime", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock"}}
        await connection.session.update(session=session)
        await connection.conversation.item.create(item=say("hello"))
        await connection.response.create(response=GREEDY | {"max_output_tokens": 100})
        arguments = ""
        async for event in connection:
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
            elif event.type == "response.function_call_arguments.done":
                called = event
            elif event.type == "response.done":
                break
        (call,) = event.response.output
        assert (called.name, called.call_id, called.arguments) == ("clock", call.call_id, arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        await connection.conversation.item.create(item=output)
        await connection.response.create(response={"tool_choice": "none", **GREEDY})
        return call, await response_of(connection)

    async with on_loopback() as server:
        call, (text, response) = await with_openai(server, talk)
        assert (call.type, call.status, call.name, call.arguments) == ("function_call", "completed", "clock", "{}")
        called = assistant('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
        assert text == expected(server, [user("hello"), called, {"role": "tool", "content": "noon"}])
        assert response.status == "completed"


async def test_what_the_package_openai_can_ask_for():
    """Cancel, retrieve, delete, responses beside the conversation, and what is refused, by its methods."""

    async def talk(connection):
        await connection.conversation.item.create(item=say("hello"))
        await connection.response.create(response={**GREEDY, "max_output_tokens": 400, "ignore_eos": True})
        while (await connection.recv()).type != "response.output_text.delta":
            pass
        await connection.response.cancel()
        _, cancelled = await response_of(connection)
        item_id = cancelled.output[0].id
        await connection.conversation.item.retrieve(item_id=item_id)
        retrieved = await connection.recv()
        await connection.conversation.item.delete(item_id=item_id)
        deleted = await connection.recv()
        await connection.response.create(response={"conversation": "none", "input": [say("aside")], **GREEDY})
        aside, beside = await response_of(connection)
        await connection.conversation.item.truncate(item_id="none", content_index=0, audio_end_ms=5)
        refused = await connection.recv()
        await connection.input_audio_buffer.append(audio="")
        no_audio = await connection.recv()
        return cancelled, retrieved, deleted, aside, beside, refused, no_audio

    async with on_loopback() as server:
        cancelled, retrieved, deleted, aside, beside, refused, no_audio = await with_openai(server, talk)
        assert (cancelled.status, cancelled.status_details.reason) == ("cancelled", "client_cancelled")
        assert (retrieved.type, retrieved.item.status) == ("conversation.item.retrieved", "incomplete")
        assert (deleted.type, deleted.item_id) == ("conversation.item.deleted", retrieved.item.id)
        assert (beside.conversation_id, aside) == (None, expected(server, [user("aside")]))
        assert (refused.type, refused.error.param) == ("error", "audio_end_ms")
        assert (no_audio.type, no_audio.error.code) == ("error", "unknown_event")


async def test_every_event_is_one_of_the_package_openai():
    """By its types, strictly; the package itself takes whatever comes."""
    adapter = pydantic.TypeAdapter(RealtimeServerEvent)
    script = [  # what is sent, and the event that ends what is told of it
        ("session.update", {"session": {"type": "realtime", "instructions": "be"}}, "session.updated"),
        ("conversation.item.create", {"item": {**say("hello"), "id": "asked"}}, "conversation.item.done"),
        ("response.create", {"response": GREEDY}, "response.done"),
        ("conversation.item.retrieve", {"item_id": "asked"}, "conversation.item.retrieved"),
        ("conversation.item.create", {"item": {**said("an answer"), "id": "said"}}, "conversation.item.done"),
        ("conversation.item.truncate", {"item_id": "said", "content_index": 0, "text_end": 2}, TRUNCATED),
        ("conversation.item.delete", {"item_id": "said"}, "conversation.item.deleted"),
        ("response.create", {"response": {"conversation": "none", "metadata": {"a": "b"}, **GREEDY}}, "response.done"),
        ("response.create", {"response": {"max_output_tokens": 3, "ignore_eos": True}}, "response.done"),
        ("session.update", {"session": {"tools": [CLOCK], "tool_choice": "required"}}, "session.updated"),
        ("response.create", {"response": {**GREEDY, "max_output_tokens": 100}}, "response.done"),
        ("conversation.item.create", {"item": OUTPUT}, "conversation.item.done"),
        ("conversation.fly", {}, "error"),
    ]

    def talk(port):
        async def call():
            async with websockets.connect(f"ws://127.0.0.1:{port}/v1/realtime?model=toy") as websocket:
                events = [json.loads(await websocket.recv())]
                for name, fields, end in script:
                    await websocket.send(json.dumps({"type": name, **fields}))
                    events.append(json.loads(await websocket.recv()))
                    while events[-1]["type"] != end:
                        events.append(json.loads(await websocket.recv()))
            return events

        return asyncio.run(call())

    async with on_loopback() as server:
        events = await trio.to_thread.run_sync(talk, server.port)
    assert {event["type"] for event in events} == EVENTS
    for event in events:
        assert adapter.validate_python(event).type == event["type"], event


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
TRUNCATED = "conversation.item.truncated"
EVENTS = {
    "conversation.item.added",
    "conversation.item.deleted",
    "conversation.item.done",
    "conversation.item.retrieved",
    TRUNCATED,
    "error",
    "response.content_part.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.content_part.done",
    "response.created",
    "response.done",
    "response.output_item.added",
    "response.output_item.done",
    "response.output_text.delta",
    "response.output_text.done",
    "session.created",
    "session.updated",
}


async def test_a_key_with_the_package_openai():
    async def talk(connection):
        await connection.conversation.item.create(item=say("hello"))
        await connection.response.create(response=GREEDY)
        return (await response_of(connection))[0]

    async with on_loopback(api_key=("secret",)) as server:
        assert await with_openai(server, talk) == expected(server, [user("hello")])
    async with on_loopback(api_key=("another",)) as server:
        with pytest.raises(websockets.exceptions.InvalidStatus):
            await with_openai(server, talk)


async def test_a_model_that_is_not_there_with_the_package_openai():
    async with on_loopback() as server:
        with pytest.raises(websockets.exceptions.InvalidStatus):
            await with_openai(server, None, model="gpt-realtime")


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_client_of_the_package_websockets_that_leaves(leave):
    """In the middle of an answer; the server is left empty."""

    def talk(port):
        async def call():
            async with websockets.connect(f"ws://127.0.0.1:{port}/v1/realtime") as websocket:
                await websocket.send(json.dumps({"type": "conversation.item.create", "item": say("hello")}))
                long = {"max_output_tokens": 400, "ignore_eos": True}
                await websocket.send(json.dumps({"type": "response.create", "response": long}))
                while json.loads(await websocket.recv())["type"] != "response.output_text.delta":
                    pass
                if leave == "abort":
                    websocket.transport.abort()

        asyncio.run(call())

    async with on_loopback() as server:
        await trio.to_thread.run_sync(talk, server.port)


async def test_a_large_answer_to_websockets():
    """Fragments, and texts beyond ASCII."""
    text = "ü😀" * 40_000

    def talk(port):
        async def call():
            async with websockets.connect(f"ws://127.0.0.1:{port}/v1/realtime", max_size=1 << 22) as websocket:
                await websocket.recv()
                item = {"type": "conversation.item.create", "item": say(text)}
                await websocket.send(json.dumps(item, ensure_ascii=False))
                return json.loads(await websocket.recv())

        return asyncio.run(call())

    async with on_loopback() as server:
        added = await trio.to_thread.run_sync(talk, server.port)
        assert added["item"]["content"][0]["text"] == text


async def test_our_own_client_on_a_socket_with_a_key():
    async with on_loopback(api_key=("secret",)) as server:
        async with connect(f"http://127.0.0.1:{server.port}", api_key="secret", model="toy") as client:
            completion = await client.generate("hello", SamplingParams(temperature=0, max_tokens=40))
        assert completion.text == expected(server, [user("hello")])
        async with connect(f"ws://127.0.0.1:{server.port}", api_key="wrong") as client:
            with pytest.raises(RequestRejected, match="key"):
                await client.generate("hello")
