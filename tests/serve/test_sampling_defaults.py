"""A model's sampling defaults hold in every interface for values that a request does not give."""

import json
import logging

import pytest
from helpers.clients import CHAT, open_clients

from trioengine import EngineConfig, SamplingParams, connect
from trioengine.core.messages import AddMessage
from trioengine.testing.simulated_worker import WorkerObserver

DEFAULTS = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 6}
MESSAGES = [{"role": "user", "content": "hello"}]


class Params(WorkerObserver):
    """Keeps the parameters of the requests that reach the worker."""

    def __init__(self):
        self.seen = []

    def handling(self, worker, event):
        if isinstance(event, AddMessage):
            self.seen.append(event.params)

    def last(self):
        params = self.seen[-1]
        return params.temperature, params.top_k, params.repetition_penalty, params.max_tokens


@pytest.fixture
def engine_config(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(DEFAULTS))
    return EngineConfig(model="toy", max_num_seqs=8, generation_config=str(path))


@pytest.fixture
def params(clients):
    observer = Params()
    clients.simulation.observers.append(observer)
    return observer


GIVEN = [
    ({}, (0.25, 7, 1.5, 6)),
    ({"temperature": None, "top_k": None, "max_tokens": None}, (0.25, 7, 1.5, 6)),
    ({"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 3}, (1.0, 0, 1.0, 3)),
]


@pytest.mark.parametrize(("given", "expected"), GIVEN)
async def test_chat(autojump_clock, clients, params, given, expected):
    body = {"messages": MESSAGES, "ignore_eos": True, **given}
    answer = await clients.request("POST", CHAT, body)
    assert answer.json["usage"]["completion_tokens"] == expected[-1]
    assert params.last() == expected


async def test_completions_keep_their_own_max_tokens(autojump_clock, clients, params):
    await clients.request("POST", "/v1/completions", {"prompt": "hello"})
    assert params.last() == (0.25, 7, 1.5, 16)


async def test_realtime(autojump_clock, clients, params):
    async with clients.realtime() as client:
        await client.ask("hello")
        assert params.last() == (0.25, 7, 1.5, 6)
        await client.ask("hello", temperature=1.0, max_output_tokens=2)
        assert params.last() == (1.0, 7, 1.5, 2)
        await client.ask("hello", temperature=None)
        assert params.last() == (0.25, 7, 1.5, 6)


async def test_embedders_and_the_client(autojump_clock, clients, params):
    engine = clients.engine
    async with connect("ws://localhost", dial=clients.dial) as client:
        for ask in (engine.generate, client.generate):
            await ask("hello")
            assert params.last() == (0.25, 7, 1.5, 6)
            await ask("hello", SamplingParams(temperature=1.0, repetition_penalty=1.0), max_tokens=2)
            assert params.last() == (1.0, 7, 1.0, 2)


async def test_min_tokens_of_a_request_beat_the_default_of_max_tokens(autojump_clock, clients, params):
    completion = await clients.engine.generate("hello", min_tokens=9)
    assert completion.usage.completion_tokens == 9


async def test_the_defaults_in_force_are_shown(autojump_clock, clients):
    (model,) = (await clients.request("GET", "/v1/models")).json["data"]
    assert model["default_sampling_params"] == {
        "temperature": 0.25,
        "top_k": 7,
        "repetition_penalty": 1.5,
        "max_tokens": 6,
    }


async def test_the_defaults_in_force_are_logged(autojump_clock, engine_config, caplog):
    caplog.set_level(logging.INFO, "trioengine")
    async with open_clients(engine_config):
        pass
    assert (
        "sampling defaults of requests: temperature 0.25, top_k 7, repetition_penalty 1.5, max_tokens 6" in caplog.text
    )
