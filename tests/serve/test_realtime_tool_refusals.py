"""Tools over WebSocket: calls that are deleted, their bytes, calls and tools without room, and refusals."""

import json

import pytest
from helpers.clients import open_clients
from helpers.realtime_tools import (
    CLOCK,
    FORCED,
    LONG,
    NAMED,
    ROOM,
    WEATHER,
    add,
    error_of,
    output_of,
)
from trio.testing import wait_all_tasks_blocked


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=ROOM) as clients:
        yield clients


async def test_calls_are_deleted_and_not_truncated(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.until("conversation.item.done")
        held = clients.server.budget
        before = held.num_bytes
        (call,) = (await client.respond(**FORCED))["output"]
        output = await add(client, output_of(call, "é"))
        for item in (call, output):
            place = {"item_id": item["id"], "content_index": 0, "text_end": 0}
            assert await error_of(client, "conversation.item.truncate", **place) == ("invalid_value", "item_id")
        expected = 2 * 512 + len("weather") + 2 * len(call["call_id"]) + len(call["arguments"]) + 4
        expected += 64 * (1 + sum(call["arguments"].count(mark) for mark in "[{,:"))  # the values
        await client.send("conversation.item.retrieve", item_id="none")
        await client.until("error")
        await wait_all_tasks_blocked()
        assert held.num_bytes - before == expected
        for item in (output, call):
            await client.send("conversation.item.delete", item_id=item["id"])
            await client.until("conversation.item.deleted")
        await wait_all_tasks_blocked()
        assert held.num_bytes == before


async def test_tools_are_counted(autojump_clock, clients):
    async with clients.realtime() as client:
        before = clients.server.budget.num_bytes
        for tools in ([{**CLOCK, "description": "x" * 5000}], []):
            await client.send("session.update", session={"tools": tools})
            await client.until("session.updated")
            await wait_all_tasks_blocked()
            assert (clients.server.budget.num_bytes - before >= 5000) == bool(tools)
        assert clients.server.budget.num_bytes == before


async def test_a_conversation_of_many_values_is_full(autojump_clock, clients):
    """The values in the arguments of calls take more memory than their text, and each prompt has them."""
    made = {"type": "function_call", "name": "clock", "arguments": json.dumps({"at": [[]] * 60_000})}
    async with clients.realtime() as client:
        await add(client, made)
        assert await error_of(client, "conversation.item.create", item=made) == ("conversation_too_large", "item")


async def test_tools_of_many_values_are_refused(autojump_clock, clients):
    tools = [{**CLOCK, "parameters": {"enum": [[]] * 20_000}}]
    async with clients.realtime() as client:
        await client.send("session.update", session={"tools": tools})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "session.tools")
        assert error["message"].startswith("session.tools must take at most 1048576 bytes of memory, got 12")


async def test_tools_without_room(autojump_clock):
    async with open_clients(max_buffered_bytes=30_000) as clients, clients.realtime() as client:
        session = {"tools": [{**CLOCK, "description": "x" * 5000}], "instructions": "be"}
        assert await error_of(client, "session.update", session=session) == ("buffers_full", None)
        await client.send("session.update", session={})
        shown = (await client.until("session.updated"))["session"]
        assert (shown["tools"], shown["instructions"]) == ([], "")


async def test_no_room_for_a_second_call(autojump_clock):
    """The response fails, and its first call stays."""
    async with open_clients(limits=ROOM, max_conversation_size=1200) as clients, clients.realtime() as client:
        await client.say("hello")
        response = await client.respond(tools=[CLOCK], tool_choice="required", min_tokens=70, **LONG)
        assert response["status_details"]["error"]["code"] == "conversation_too_large"
        (call,) = response["output"]
        assert (call["name"], call["status"], response["status"]) == ("clock", "completed", "failed")


REFUSED = [
    ({"tools": {}}, "invalid_type", "tools"),
    ({"tools": [{"type": "function"}]}, "missing_parameter", "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [{**CLOCK, "parameters": []}]}, "invalid_type", "tools[0].parameters"),
    ({"tools": [CLOCK] * 129}, "invalid_value", "tools"),
    ({"tools": [CLOCK], "tool_choice": NAMED}, "invalid_value", "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "mcp"}}, "invalid_value", "tool_choice.type"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": NAMED}, "invalid_value", "tool_choice"),
    ({"tool_choice": "any"}, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_refused_tools(autojump_clock, clients, fields, code, param):
    async with clients.realtime() as client:
        assert await error_of(client, "session.update", session=fields) == (code, f"session.{param}")
        assert await error_of(client, "response.create", response=fields) == (code, f"response.{param}")


async def test_other_tools_are_passed_over_and_named(autojump_clock, caplog, clients):
    async with clients.realtime() as client:
        await client.send("session.update", session={"tools": [{"type": "mcp", "server_label": "x"}, CLOCK]})
        assert (await client.until("session.updated"))["session"]["tools"] == [CLOCK]
    assert "tools.mcp" in caplog.text


@pytest.mark.parametrize("item", [{"name": "f"}, {"name": "f", "arguments": {}}, {"name": 1, "arguments": "{}"}])
async def test_refused_calls(autojump_clock, clients, item):
    async with clients.realtime() as client:
        code, param = await error_of(client, "conversation.item.create", item={"type": "function_call", **item})
        assert code in ("missing_parameter", "invalid_type") and param in ("item.arguments", "item.name")


async def test_a_schema_that_makes_no_grammar(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        tools = [{**WEATHER, "parameters": {"type": "no such type"}}]
        error = await error_of(client, "response.create", response={"tools": tools, "tool_choice": "required"})
        assert error == ("invalid_grammar", "tools")
