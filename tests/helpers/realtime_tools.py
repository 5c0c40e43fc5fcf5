"""Tools over WebSocket: the tools, a template that prints them, and what a client sends and gets."""

from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from helpers.clients import Clients
from trioengine import EngineConfig, open_engine
from trioengine.testing import Simulation
from trioengine.testing.simulation import DEFAULT_LIMITS
from trioengine.testing.toy_model import toy_model
from trioengine.text.chat_template import ChatTemplate

ROOM = replace(DEFAULT_LIMITS, max_model_len=2048, kv_blocks_total=512)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "additionalProperties": False}}
NAMED = {"type": "function", "name": "weather"}
LONG = {"temperature": 0, "max_output_tokens": 200}
FORCED = {"tools": [WEATHER], "tool_choice": NAMED, **LONG}
CALLED = [
    *("response.created", "response.output_item.added", "conversation.item.added"),
    *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
    *("conversation.item.done", "response.output_item.done", "response.done"),
]


TEMPLATE = """{% for tool in tools or [] %}<{{ tool | tojson }}>{% endfor %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}({{ call | tojson }}){% endfor %}
{{- message.tool_call_id or "" }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@asynccontextmanager
async def clients_of_a_template():
    """A model whose template prints tools."""
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, limits=ROOM)
        model = replace(toy_model(ROOM.max_model_len), chat_template=ChatTemplate(TEMPLATE))
        ports = replace(simulation.ports, read_model=lambda path: model)
        async with open_engine(EngineConfig(model="toy"), ports=ports) as engine:
            yield Clients(engine, simulation, nursery)
            nursery.cancel_scope.cancel()


def kinds(events):
    """The types of events, without repetitions."""
    types = [event["type"] for event in events]
    return [kind for index, kind in enumerate(types) if types[index - 1 : index] != [kind]]


def function(tool):
    """The tool in the form of chat completions."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def output_of(call, text):
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


async def add(client, item, **fields):
    await client.send("conversation.item.create", item=item, **fields)
    return (await client.until("conversation.item.done"))["item"]


async def error_of(client, name, **fields):
    await client.send(name, **fields)
    error = (await client.until("error"))["error"]
    return error["code"], error["param"]


def user_item(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
