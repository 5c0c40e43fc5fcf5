"""/openapi.json is a valid document that describes every route, and every response is one that it promises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from helpers.clients import CHAT, Answer, Clients, chat, clients_of_a_loading_server, open_clients
from helpers.described import Described, described_path
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from trioengine import __version__
from trioengine.core.errors import InvariantError
from trioengine.serve.auth import Role
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import DEFAULT_LIMITS

ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # which need a directory
KEYS = {"api_key": "user-key-of-this-test", "admin_key": "admin-key-of-this-test"}
HTTP_PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


@pytest.mark.parametrize("options", [{}, KEYS], ids=["no key", "keys"])
async def test_the_document_is_valid(autojump_clock, options):
    async with open_clients(**options) as clients:
        document = (await Described.by(clients)).document
        validate(document)
        assert (document["openapi"], document["info"]["version"]) == ("3.1.1", __version__)


async def test_every_route_is_described(autojump_clock, clients):
    """And docs/http.md names it."""
    routes = clients.server.connections._routes
    document = (await Described.by(clients)).document
    assert list(document["paths"]) == [described_path(key) for key in routes]
    for key, route in routes.items():
        ((method, operation),) = document["paths"][described_path(key)].items()
        assert method.upper() in route.handlers
        assert operation["summary"] and "\n" not in operation["summary"]
        assert operation["tags"] == [route.role.value]
        assert f"`{method.upper()} {described_path(key)}`" in HTTP_PAGE or key == "/wakeup", key
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


async def test_keys_are_described_where_they_are_configured(autojump_clock):
    async with open_clients() as clients:
        document = (await Described.by(clients)).document
        assert "securitySchemes" not in document["components"]
        assert "security" not in json.dumps(document)
    async with open_clients(**KEYS) as clients:
        document = (await Described.by(clients)).document
        schemes = document["components"]["securitySchemes"]
        assert (schemes["bearer"]["scheme"], schemes["header"]["name"]) == ("bearer", "X-Api-Key")
        for key, route in clients.server.connections._routes.items():
            (operation,) = document["paths"][described_path(key)].values()
            expected = None if route.role is Role.ANYONE else [{"bearer": []}, {"header": []}]
            assert operation.get("security") == expected
            assert ("401" in operation["responses"]) == (expected is not None)


async def test_the_examples_are_answered(autojump_clock, clients):
    described = await Described.by(clients)
    for path, item in described.document["paths"].items():
        for method, operation in item.items():
            if "requestBody" in operation and path not in ("/update_weights", *ADAPTERS, EMBEDDINGS):
                content = operation["requestBody"]["content"]["application/json"]
                whole = {**content["schema"], "components": described.document["components"]}
                OAS31Validator(whole).validate(content["example"])
                answer = await clients.request(method.upper(), path, content["example"])
                assert described.check(method, path, answer).status == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
CALL = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
SHOWN = {"n": 2, "return_token_ids": True, "timings_per_token": True, "stop": "x"}
STREAMED = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
REQUESTS = [
    ("GET", "/", None, {}, 200),
    ("GET", "/", None, {"accept": "text/html"}, 200),
    ("GET", "/docs", None, {}, 200),
    ("GET", "/openapi.json", None, {}, 200),
    ("GET", "/openapi.json?x=1", None, {}, 400),
    ("GET", "/health", None, {}, 200),
    ("GET", "/ready", None, {}, 200),
    ("GET", "/ready", None, {"host": "example.com"}, 403),
    ("GET", "/version", None, {}, 200),
    ("GET", "/metrics", None, {}, 200),
    ("GET", "/v1/models", None, {}, 200),
    ("GET", "/v1/models/toy", None, {}, 200),
    ("GET", "/v1/models/other", None, {}, 404),
    ("GET", "/v1/realtime", None, {}, 426),
    ("POST", CHAT, chat(), {}, 200),
    ("POST", CHAT, chat(logprobs=True, top_logprobs=3), {}, 200),
    ("POST", CHAT, chat(stream=True), {}, 200),
    ("POST", CHAT, chat(stream=True, logprobs=True, stream_options={"include_usage": True}), {}, 200),
    ("POST", CHAT, CALL, {}, 200),
    ("POST", CHAT, {**CALL, "stream": True}, {}, 200),
    ("POST", "/v1/completions", {"prompt": ["a", "b"]}, {}, 200),
    ("POST", "/v1/completions", STREAMED, {}, 200),
    ("POST", "/v1/completions", {"prompt": []}, {}, 400),
    ("POST", CHAT, chat(**SHOWN), {}, 200),
    ("POST", CHAT, chat(**SHOWN, stream=True, stream_options={"continuous_usage_stats": True}), {}, 200),
    ("POST", "/v1/completions", {"prompt": "a", **SHOWN}, {}, 200),
    ("POST", "/v1/completions", {**STREAMED, **SHOWN}, {}, 200),
    ("POST", "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2}, {}, 200),
    ("POST", "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}, {}, 200),
    ("POST", "/v1/completions", {**STREAMED, "echo": True, "logprobs": 2}, {}, 200),
    ("POST", "/v1/embeddings", {"input": "a"}, {}, 400),
    ("GET", "/tokenizer_info", None, {}, 200),
    ("POST", CHAT, chat(model="other"), {}, 404),
    ("POST", CHAT, chat(max_tokens="x"), {}, 400),
    ("POST", CHAT, chat("x" * 1000), {}, 400),
    ("POST", CHAT, chat(), {"content-encoding": "gzip"}, 415),
    ("POST", CHAT, b"{", {}, 400),
    ("POST", CHAT, bytes((4 << 20) + 1), {}, 413),
    ("POST", "/tokenize", {"prompt": "be", "return_token_strs": True}, {}, 200),
    ("POST", "/tokenize", {"messages": chat()["messages"]}, {}, 200),
    ("POST", "/tokenize", {}, {}, 400),
    ("POST", "/detokenize", {"tokens": [98, 101]}, {}, 200),
    ("POST", "/detokenize", {"tokens": [-1]}, {}, 400),
    ("GET", "/debug/invariants", None, {}, 200),
    ("POST", "/abort_request", {"abort_all": True}, {}, 200),
    ("POST", "/abort_request", {"request_id": "x"}, {}, 200),
    ("POST", "/abort_request", {}, {}, 400),
    ("GET", "/is_sleeping", None, {}, 200),
    ("POST", "/update_weights", {"name": "x"}, {}, 403),
    ("POST", "/wake_up?tags=weights,kv_cache&reload=false", None, {}, 200),
    ("POST", "/wakeup?tags=nothing", None, {}, 400),
    ("POST", "/sleep?level=2&mode=keep", None, {}, 200),
    ("POST", "/sleep?level=1", None, {}, 409),
    ("GET", "/is_sleeping", None, {}, 200),
    ("GET", "/ready", None, {}, 503),
    ("POST", CHAT, chat(), {}, 503),
    ("POST", "/wakeup", None, {}, 200),
    ("POST", "/sleep?level=3", None, {}, 400),
]


async def test_responses_are_as_described(autojump_clock, clients):
    described = await Described.by(clients)
    for method, path, content, headers, status in REQUESTS:
        answer = await clients.request(method, path, content, **headers)
        assert answer.status == status, (method, path, answer)
        described.check(method, path, answer)
    ids = {operation["operationId"] for item in described.document["paths"].values() for operation in item.values()}
    successes = {id for id, status, _ in described.seen if status == 200}
    assert ids - successes == {
        *("get_v1_realtime", "post_update_weights", "post_v1_embeddings"),
        *("post_v1_load_lora_adapter", "post_v1_unload_lora_adapter"),
    }


EMBEDDINGS = "/v1/embeddings"
EMBEDDING_REQUESTS = [
    (EMBEDDINGS, {"input": ["a", "b"]}, 200),
    (EMBEDDINGS, {"input": [[97], [98, 99]], "encoding_format": "base64", "dimensions": 3}, 200),
    (EMBEDDINGS, {"input": "a", "dimensions": 9}, 400),
    (EMBEDDINGS, {"input": "a", "model": "other"}, 404),
    (CHAT, chat(), 400),
]


async def test_responses_of_an_embedding_model_are_as_described(autojump_clock):
    async with open_clients(limits=replace(DEFAULT_LIMITS, embeds=True)) as clients:
        described = await Described.by(clients)
        content = described.document["paths"][EMBEDDINGS]["post"]["requestBody"]["content"]["application/json"]
        for path, body, status in ((EMBEDDINGS, content["example"], 200), *EMBEDDING_REQUESTS):
            answer = await clients.request("POST", path, body)
            assert described.check("POST", path, answer).status == status


async def test_refusals_for_a_key_are_as_described(autojump_clock):
    async with open_clients(max_sessions_per_key=1, **KEYS) as clients, clients.connect() as client:
        described = await Described.by(clients)
        key = {"authorization": f"Bearer {KEYS['api_key']}"}
        await client.send("POST", CHAT, chat(stream=True, max_tokens=100), **key)
        await client.head()
        for path, headers, status in (("/version", {}, 401), ("/is_sleeping", key, 403), ("/version", key, 429)):
            answer = await clients.request("GET", path, **headers)
            assert described.check("GET", path, answer).status == status
        await client.rest()


async def test_a_stream_that_fails_is_as_described(autojump_clock, clients):
    described = await Described.by(clients)
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, max_tokens=400))
        status, headers = await client.head()
        await clients.request("POST", "/abort_request", {"abort_all": True})
        described.check("POST", CHAT, Answer(status, headers, await client.rest()))


async def test_an_engine_that_is_full_or_fails_is_as_described(autojump_clock, monkeypatch):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        described = await Described.by(clients)

        async def check():
            raise InvariantError("one is missing")

        monkeypatch.setattr(engine, "check_invariants", check)
        answer = await clients.request("GET", "/debug/invariants")
        assert described.check("GET", "/debug/invariants", answer).status == 500
        monkeypatch.undo()
        engine.close()
        for path in ("/health", "/ready"):
            assert described.check("GET", path, await clients.request("GET", path)).status == 503


async def test_a_loading_server_is_as_described(autojump_clock):
    async with clients_of_a_loading_server(DEFAULT_LIMITS) as (clients, found):
        described = await Described.by(clients)
        for method, path, content, status in (
            ("GET", "/v1/models", None, 200),
            ("GET", "/ready", None, 503),
            ("POST", "/tokenize", {"prompt": "a"}, 503),
            ("POST", CHAT, chat(), 503),
            ("GET", "/is_sleeping", None, 200),
            ("POST", "/sleep", None, 409),
        ):
            answer = await clients.request(method, path, content)
            assert described.check(method, path, answer).status == status
        found.set()
        await clients.engine.ready()
