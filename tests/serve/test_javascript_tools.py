"""Tools in docs/trioengine.mjs: calls, their outputs, and the conversation that has them."""

import json
from functools import partial
from pathlib import Path

import trio
from helpers.loopback import on_loopback
from test_javascript import in_node
from test_realtime_tools import WEATHER
from test_tools import ROOM

PROGRAM = Path(__file__).with_name("javascript_tools.mjs")


async def test_tools_in_node():
    async with on_loopback(ROOM) as server:
        run = partial(in_node, PROGRAM, f"ws://127.0.0.1:{server.port}", WEATHER)
        results = await trio.to_thread.run_sync(run)
    called, answered = results["called"], results["answered"]
    assert (called["text"], called["status"]) == ("", "completed")
    (call,) = called["tool_calls"]
    assert call.keys() == {"call_id", "name", "arguments"} and call["name"] == "weather"
    assert json.loads(call["arguments"]).keys() == {"city", "days"}
    assert results["own"] == [call]
    assert answered["text"] and answered["tool_calls"] == []
    assert results["history"] == results["copied"]
    assert results["history"] == [
        {"role": "user", "content": "hello"},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
        {"role": "assistant", "content": answered["text"]},
    ]
    assert results["cancelled"] == [[], 4]
    assert (results["cut"]["status"], results["cut"]["tool_calls"]) == ("incomplete", [])
    assert results["cutHistory"] == [{"role": "user", "content": "cut"}]
    assert results["refused"] == ["TrioengineError", "invalid_type", "item.output"]
    assert results["unknown"] == ["TrioengineError", "invalid_type", "response.tools"]
    assert results["still"] == 5
    assert results["continued"]["status"] in ("completed", "incomplete") and results["continued"]["text"]
    assert results["updated"] == 1
