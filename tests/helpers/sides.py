"""The two APIs with one surface: an engine in this process, and a client of a server over such an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from helpers.clients import Clients
from trioengine import Client, Engine, EngineConfig, SamplingParams, connect
from trioengine.testing import Simulation, simulated_engine, toy_answer

GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SIDES = ("engine", "client")


@dataclass(frozen=True)
class Side:
    """One API; `engine` runs its requests, on the worker of `simulation`."""

    name: str
    api: Engine | Client
    engine: Engine
    simulation: Simulation

    def answer_ids(self, messages: list[dict[str, str]], params: SamplingParams = GREEDY) -> list[int]:
        """The tokens of the model's answer to a chat."""
        prompt = self.engine.tokenizer.apply_chat_template(messages)
        assert params.max_tokens is not None
        return toy_answer(prompt, params.max_tokens, ignore_eos=params.ignore_eos)

    def answer(self, messages: list[dict[str, str]], params: SamplingParams = GREEDY) -> str:
        """The text of the model's answer to a chat."""
        return self.engine.tokenizer.decode(self.answer_ids(messages, params))

    async def until_finished(self, count: int) -> None:
        """Wait until so many requests ran to their end."""
        while self.engine.statistics().finished < count:
            await self.engine.runtime.gate.changed()


@asynccontextmanager
async def open_side(name: str, config: EngineConfig | None = None, **options: Any) -> AsyncIterator[Side]:
    """A side, which must have given everything back in the end. `options` are of `simulated_engine`."""
    async with simulated_engine(config, **options) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        if name == "engine":
            yield Side(name, engine, engine, simulation)
        else:
            async with connect("ws://localhost", dial=clients.dial) as client:
                yield Side(name, client, engine, simulation)
        with trio.fail_after(60):
            await clients.all_closed()
            await clients.everything_is_given_back()
        statistics = engine.statistics()
        assert statistics.received == statistics.finished + statistics.aborted + statistics.failed


@asynccontextmanager
async def open_api(name: str) -> AsyncIterator[Engine | Client]:
    """The API of a side."""
    async with open_side(name) as side:
        yield side.api


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
