"""Structured output and tools by packages of others, unmodified, over a socket to a server that is simulated."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import instructor
import openai
import pytest
import trio
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from trioengine import EngineConfig
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulation import DEFAULT_LIMITS

ROOM = replace(DEFAULT_LIMITS, max_model_len=4096, kv_blocks_total=2048)
MESSAGES = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    is_old: bool


@asynccontextmanager
async def running():
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery, limits=ROOM)
        run = partial(serve, EngineConfig(model="toy"), ServeConfig(port=0), ports=simulation.ports)
        server = await nursery.start(run)
        await server.engine.ready()
        yield f"http://127.0.0.1:{server.port}/v1"
        while server.engine.statistics().sessions:
            await server.engine.runtime.gate.changed()
        await server.engine.check_invariants()
        server.abort()


async def with_openai(function):
    """Call it in a thread with an OpenAI client."""
    async with running() as url:

        def call():
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                return function(client)

        return await trio.to_thread.run_sync(call)


async def test_openai_parses_a_model():
    def ask(client):
        return client.chat.completions.parse(model="toy", messages=MESSAGES, response_format=Person)

    completion = await with_openai(ask)
    assert isinstance(completion.choices[0].message.parsed, Person)


async def test_openai_streams_a_model():
    def ask(client):
        with client.chat.completions.stream(model="toy", messages=MESSAGES, response_format=Person) as stream:
            events = [event.type for event in stream]
            return events, stream.get_final_completion()

    events, completion = await with_openai(ask)
    assert {"content.delta", "content.done"} <= set(events)
    assert isinstance(completion.choices[0].message.parsed, Person)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_calls_a_tool(stream):
    fields = {
        "model": "toy",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Person)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }

    def ask(client):
        if not stream:
            return client.chat.completions.parse(**fields)
        with client.chat.completions.stream(**fields) as events:
            for _ in events:
                pass
            return events.get_final_completion()

    (choice,) = (await with_openai(ask)).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
async def test_instructor(mode):
    def ask(client):
        patched = instructor.from_openai(client, mode=mode)
        return patched.chat.completions.create(model="toy", messages=MESSAGES, response_model=Person, max_retries=0)

    assert isinstance(await with_openai(ask), Person)


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
async def test_pydantic_ai(output):
    async with running() as url:

        async def ask():
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                model = OpenAIChatModel("toy", provider=OpenAIProvider(openai_client=client))
                return (await Agent(model, output_type=output(Person)).run("hello")).output

        assert isinstance(await trio.to_thread.run_sync(asyncio.run, ask()), Person)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_langchain_structured_output(method):
    async with running() as url:

        def ask():
            model = ChatOpenAI(model="toy", base_url=url, api_key="none", max_retries=0)
            return model.with_structured_output(Person, method=method).invoke("hello")

        assert isinstance(await trio.to_thread.run_sync(ask), Person)


async def test_langchain_tools():
    async with running() as url:

        def ask():
            model = ChatOpenAI(model="toy", base_url=url, api_key="none", max_retries=0)
            chosen = model.bind_tools([Person], tool_choice="any", parallel_tool_calls=False)
            whole = chosen.invoke("hello")
            pieces = list(chosen.stream("hello"))
            return whole, sum(pieces[1:], pieces[0])

        for message in await trio.to_thread.run_sync(ask):
            (call,) = message.tool_calls
            assert call["name"] == "Person" and Person(**call["args"])
