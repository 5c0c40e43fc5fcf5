"""POST /v1/embeddings: vectors in the order of the inputs, in both formats, and each refusal in OpenAI's shape."""

import base64
import math
import struct
from dataclasses import replace

import pytest
import trio
import trio.testing
from helpers.clients import chat, open_clients

from trioengine import EngineConfig
from trioengine.core.embedding import MAX_INPUTS
from trioengine.testing.simulation import DEFAULT_LIMITS
from trioengine.testing.toy_model import TOY_EMBEDDING_SIZE, toy_embedding

PATH = "/v1/embeddings"
LIMITS = replace(DEFAULT_LIMITS, embeds=True)
LONG = "to be, or not to be, " * 20
KEYS = {"api_key": ("k" * 20, "o" * 20)}
KEY = {"authorization": f"Bearer {'k' * 20}"}


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=LIMITS) as clients:
        yield clients


def expected(given):
    return toy_embedding(given.encode() if isinstance(given, str) else given)


def packed(numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


INPUTS = [
    ("to be", ["to be"]),
    ([116, 111], [[116, 111]]),
    (["to be", "or not", "é", "to be"], ["to be", "or not", "é", "to be"]),
    ([[116], [111, 112]], [[116], [111, 112]]),
    ([f"number {i}" for i in range(200)], [f"number {i}" for i in range(200)]),
]


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
@pytest.mark.parametrize(("given", "each"), INPUTS, ids=range(len(INPUTS)))
async def test_embeddings(autojump_clock, clients, given, each, encoding):
    """The numbers are the worker's, to the last bit; also with more inputs than the engine has slots at a time."""
    answer = await clients.request("POST", PATH, {"model": "toy", "input": given, "encoding_format": encoding})
    assert answer.status == 200
    assert answer.json.keys() == {"object", "data", "model", "usage"}
    assert (answer.json["object"], answer.json["model"]) == ("list", "toy")
    num_tokens = sum(len(one.encode() if isinstance(one, str) else one) for one in each)
    assert answer.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    data = answer.json["data"]
    assert [(entry["object"], entry["index"]) for entry in data] == [("embedding", i) for i in range(len(each))]
    found = [entry["embedding"] for entry in data]
    if encoding == "base64":
        assert [base64.b64decode(text) for text in found] == [expected(one) for one in each]
    else:
        assert [packed(numbers) for numbers in found] == [expected(one) for one in each]


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_dimensions(autojump_clock, clients, encoding):
    whole = struct.unpack("<8f", expected("a"))
    for dimensions in (1, 3, TOY_EMBEDDING_SIZE):
        fields = {"input": "a", "dimensions": dimensions, "encoding_format": encoding}
        (entry,) = (await clients.request("POST", PATH, fields)).json["data"]
        found = entry["embedding"]
        if encoding == "base64":
            found = struct.unpack(f"<{dimensions}f", base64.b64decode(found))
        length = math.hypot(*whole[:dimensions])
        assert list(found) == pytest.approx([number / length for number in whole[:dimensions]], abs=1e-7)


REFUSED = [
    ({}, "missing_parameter", "input", "input is missing"),
    ({"input": None}, "missing_parameter", "input", "input is missing"),
    ({"input": ""}, "empty_prompt", "input", "input is empty"),
    ({"input": []}, "invalid_value", "input", "input must be"),
    ({"input": 7}, "invalid_type", "input", "input must be"),
    ({"input": [[]]}, "invalid_value", "input[0]", "input[0] must be"),
    ({"input": ["a", ""]}, "empty_prompt", "input[1]", "input[1] is empty"),
    ({"input": ["a", 5]}, "invalid_type", "input", "input must hold texts, token ids, or lists of token ids"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "invalid_value", "input", "input must have 1 to 2048 entries, got 2049"),
    (
        {"input": ["a", "b" * 600]},
        "context_length_exceeded",
        "input[1]",
        "input[1]: 600 tokens are too many for a context of 512",
    ),
    ({"input": "b" * 513}, "context_length_exceeded", "input", "input: 513 tokens are too many for a context of 512"),
    ({"input": [5, 300]}, "invalid_value", "input", "input must hold token ids from 0 to 258, got 300"),
    ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions", "dimensions must be an integer from 1 to"),
    (
        {"input": "a", "dimensions": 9},
        "invalid_value",
        "dimensions",
        "dimensions must be an integer from 1 to 8, got 9",
    ),
    ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format", 'must be "base64" or "float"'),
    ({"input": "a", "truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens", "not supported"),
]


@pytest.mark.parametrize(("fields", "code", "param", "message"), REFUSED, ids=range(len(REFUSED)))
async def test_refusals(autojump_clock, clients, fields, code, param, message):
    answer = await clients.request("POST", PATH, fields)
    error = answer.error
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == (code, param)
    assert message in error["message"]
    assert clients.engine.statistics().received == 0


async def test_another_model(autojump_clock, clients):
    answer = await clients.request("POST", PATH, {"model": "other", "input": "a"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_fields_without_effect(autojump_clock, clients):
    answer = await clients.request("POST", PATH, {"input": "a", "user": "me", "inputtype": "query"})
    assert (answer.status, answer.headers["x-unknown-fields"]) == (200, "inputtype")


async def test_a_model_that_generates(autojump_clock):
    async with open_clients() as clients:
        answer = await clients.request("POST", PATH, {"input": "a"})
        error = answer.error
        assert (answer.status, error["code"]) == (400, "embeddings_not_supported")
        assert error["message"] == "the model generates texts: it is not an embedding model"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(stream=True)),
        ("/v1/chat/completions", chat(n=3)),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}),
    ],
)
async def test_other_routes_of_an_embedding_model(autojump_clock, clients, path, fields):
    answer = await clients.request("POST", path, fields)
    assert (answer.status, answer.error["code"]) == (400, "generation_not_supported")
    message = "the model is an embedding model, and answers nothing: use engine.embed, or POST /v1/embeddings"
    assert answer.error["message"] == message


async def test_realtime_of_an_embedding_model(autojump_clock, clients):
    async with clients.realtime() as client:
        response = await client.ask("hello")
    assert response["status"] == "failed"
    error = response["status_details"]["error"]
    assert error["code"] == "generation_not_supported" and "/v1/embeddings" in error["message"]


async def under_way(engine):
    """Wait until the worker has a request; its only row is its last one."""
    await trio.testing.wait_all_tasks_blocked()
    assert engine.statistics().waiting


@pytest.mark.parametrize("count", [1, 5, 300])
async def test_a_client_that_leaves_ends_all(autojump_clock, clients, count):
    async with clients.connect() as client:
        await client.send("POST", PATH, {"input": [LONG] * count})
        await under_way(clients.engine)
        await trio.aclose_forcefully(client.stream)
    await clients.everything_is_given_back()
    statistics = clients.engine.statistics()
    assert statistics.abort_causes["disconnect"] == statistics.aborted
    assert 1 <= statistics.aborted <= min(count, 64)


async def test_an_abort_by_id_ends_all(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", PATH, {"input": [LONG] * 5, "request_id": "mine"})
        await under_way(clients.engine)
        aborted = await clients.request("POST", "/abort_request", {"request_id": "mine"})
        assert aborted.json == {"aborted": 5}
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "aborted")


async def test_a_death_is_not_seen(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", PATH, {"input": [LONG] * 5, "encoding_format": "base64"})
        await under_way(clients.engine)
        clients.simulation.worker.kill()
        answer = await client.answer()
    assert [base64.b64decode(entry["embedding"]) for entry in answer.json["data"]] == [expected(LONG)] * 5


async def test_a_full_engine(autojump_clock):
    """The first input must find a slot; those behind it wait."""
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)
    async with open_clients(config, limits=LIMITS) as clients, clients.connect() as client:
        await client.send("POST", PATH, {"input": [LONG] * 20})
        await under_way(clients.engine)
        refused = await clients.request("POST", PATH, {"input": "a"})
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert len((await client.answer()).json["data"]) == 20


async def test_inputs_are_sessions_of_the_key(autojump_clock):
    async with open_clients(limits=LIMITS, max_sessions_per_key=2, **KEYS) as clients, clients.connect() as client:
        await client.send("POST", PATH, {"input": [LONG] * 9}, **KEY)
        most = 0
        while clients.engine.statistics().finished < 9:
            await clients.engine.runtime.gate.changed()
            most = max(most, sum(clients.server.connections._access._sessions._counts.values()))
        assert len((await client.answer()).json["data"]) == 9
        assert most == 2


async def test_keys_share_no_prefixes(autojump_clock):
    async with open_clients(limits=LIMITS, **KEYS) as clients:
        for key, hits in (("k", 0), ("k", 1), ("o", 1)):
            before = clients.engine.statistics().prefix_cache_hits
            headers = {"authorization": f"Bearer {key * 20}"}
            await clients.request("POST", PATH, {"input": LONG}, **headers)
            assert (clients.engine.statistics().prefix_cache_hits > before) == (key == "k" and hits == 1)


async def test_a_response_beyond_the_budget_of_the_key(autojump_clock):
    """It is refused before anything is computed."""
    async with open_clients(limits=LIMITS, max_buffered_bytes_per_key=100_000, **KEYS) as clients:
        for encoding, status in (("float", 429), ("base64", 200)):
            fields = {"input": [[97]] * 1000, "encoding_format": encoding}
            answer = await clients.request("POST", PATH, fields, **KEY)
            assert answer.status == status
            assert clients.engine.statistics().received == (1000 if status == 200 else 0)
