"""Models, tokenize and detokenize, and the operator's routes."""

import json

import pytest
import trio
from helpers.clients import CHAT, Clients, chat, events_of
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, SamplingParams
from trioengine.core.errors import InvariantError
from trioengine.core.types import Cause
from trioengine.serve.auth import Role
from trioengine.serve.http import json_response
from trioengine.serve.routes import Operation, find_route, get
from trioengine.testing import simulated_engine
from trioengine.text.tokenizer import Tokenizer

ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
MODEL = {
    "id": "toy",
    "object": "model",
    "owned_by": "trioengine",
    "parent": None,
    "max_model_len": 512,
    "default_sampling_params": {},
}


async def test_models(autojump_clock, clients):
    listed = (await clients.request("GET", "/v1/models")).json
    (model,) = listed["data"]
    assert listed == {"object": "list", "data": [model]}
    assert model == MODEL | {"created": model["created"]}
    assert (await clients.request("GET", "/v1/models/toy")).json == model


@pytest.mark.parametrize("name", ["", "other", "toy/other", "%FF", "t%6Fys"])
async def test_another_model(autojump_clock, clients, name):
    answer = await clients.request("GET", f"/v1/models/{name}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_a_model_with_a_path_as_its_name(autojump_clock, clients):
    clients = Clients(clients.engine, clients.simulation, clients._nursery, served_model_name="some one/a model")
    for name in ("some%20one/a%20model", "some%20one%2Fa%20model"):
        assert (await clients.request("GET", f"/v1/models/{name}")).json["id"] == "some one/a model"
    assert (await clients.chat(model="some one/a model")).json["model"] == "some one/a model"
    await clients.all_closed()


async def test_models_are_known_before_the_engine_is_ready(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        engine.runtime._limits = None
        assert (await clients.request("GET", "/v1/models")).json["data"][0]["max_model_len"] is None
        answer = await clients.request("POST", "/tokenize", {"prompt": "x"})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_which_route():
    async def handler(request):
        return json_response(200, {})

    routes = {"/a": get(handler, Operation()), "/a/*": get(handler, Operation(), Role.OPERATOR)}
    assert find_route(routes, "/a") is routes["/a"]
    assert find_route(routes, "/a/b") is find_route(routes, "/a/b/c") is find_route(routes, "/a/") is routes["/a/*"]
    assert find_route(routes, "/ab") is None


# ---- tokens -------------------------------------------------------------------------------------------------------


async def test_tokenize_a_text(autojump_clock, clients):
    answer = await clients.request("POST", "/tokenize", {"model": "toy", "prompt": "hi<|im_end|>"})
    assert answer.json == {"count": 3, "max_model_len": 512, "tokens": [104, 105, 258], "token_strs": None}


@pytest.mark.parametrize("add_special_tokens", [True, False, None])
async def test_token_strings(autojump_clock, clients, add_special_tokens):
    body = {"prompt": "a b", "return_token_strs": True, "add_special_tokens": add_special_tokens}
    assert (await clients.request("POST", "/tokenize", body)).json["token_strs"] == ["a", "Ġ", "b"]


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
async def test_tokenize_messages(autojump_clock, clients, add_generation_prompt):
    body = {"messages": MESSAGES, "add_generation_prompt": add_generation_prompt}
    ids = clients.engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert (await clients.request("POST", "/tokenize", body)).json["tokens"] == ids


async def test_tokens_there_and_back(autojump_clock, clients):
    text = "ä€😀 <|im_start|>x"
    tokens = (await clients.request("POST", "/tokenize", {"prompt": text})).json["tokens"]
    assert (await clients.request("POST", "/detokenize", {"tokens": tokens})).json == {"prompt": text}


async def test_long_texts_are_tokenized_in_a_thread(autojump_clock, clients):
    """Others are served meanwhile; the answer is rendered there, too."""
    clients.simulation.thread_passes = 1000
    body, order = json.dumps({"prompt": "hello"}).encode() + b" " * 10_000, []

    async def request(name, *what):
        answer = await clients.request(*what)
        assert answer.status == 200
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, "tokenize", "POST", "/tokenize", body)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        nursery.start_soon(request, "health", "GET", "/health")
    assert order == ["health", "tokenize"]


async def test_as_many_tokens_as_the_context_has(autojump_clock, clients):
    tokens = (await clients.request("POST", "/tokenize", {"prompt": "x" * 512})).json["tokens"]
    assert (await clients.request("POST", "/detokenize", {"tokens": tokens})).json == {"prompt": "x" * 512}
    answer = await clients.request("POST", "/tokenize", {"prompt": "x" * 513})
    assert answer.error["message"] == "prompt: 513 tokens, the context is 512"


LONG = "x" * 100_000
REFUSED = [
    ("/tokenize", {"prompt": "x" * 513}, 400, "context_length_exceeded", "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 513}]}, 400, "context_length_exceeded", "messages"),
    ("/detokenize", {"tokens": [97] * 513}, 400, "context_length_exceeded", "tokens"),
    ("/tokenize", {"prompt": LONG}, 400, "context_length_exceeded", "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, 400, "context_length_exceeded", "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 3000}, 400, "context_length_exceeded", "messages"),
    ("/tokenize", {}, 400, "missing_parameter", "messages"),
    ("/tokenize", {"prompt": 1}, 400, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, 400, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "invalid_value", "messages"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "invalid_value", "add_generation_prompt"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "invalid_value", "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, 400, "invalid_type", "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "invalid_type", "return_token_strs"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model_not_found", "model"),
    ("/detokenize", {}, 400, "missing_parameter", "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [1, 259]}, 400, "invalid_value", "tokens[1]"),
    ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
    ("/detokenize", {"tokens": [True]}, 400, "invalid_type", "tokens[0]"),
    ("/detokenize", {"tokens": [1.0]}, 400, "invalid_value", "tokens[0]"),
    ("/detokenize", {"tokens": [], "model": "other"}, 404, "model_not_found", "model"),
    ("/abort_request", {}, 400, "invalid_value", "request_id"),
    ("/abort_request", {"request_id": "x", "abort_all": True}, 400, "invalid_value", "request_id"),
    ("/abort_request", {"request_id": 1}, 400, "invalid_type", "request_id"),
    ("/abort_request", {"abort_all": 1}, 400, "invalid_type", "abort_all"),
    ("/abort_request", {"abort_all": False}, 400, "invalid_value", "request_id"),
    ("/abort_request", {"id": "x"}, 400, "unsupported_parameter", "id"),
]


async def test_tokenize_says_what_it_takes(autojump_clock, clients):
    answer = await clients.request("POST", "/tokenize", {})
    assert answer.error["message"] == "give a prompt, or messages: a list of at least one"


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused(autojump_clock, clients, path, body, status, code, param):
    answer = await clients.request("POST", path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)


TOKENIZER = """{"version": "1.0", "added_tokens": [
  {"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
   "special": true}],
 "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
  {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1],
  "tokens": ["<s>"]}}},
 "model": {"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []}}"""


def test_the_special_tokens_around_a_text():
    tokenizer = Tokenizer.from_json(TOKENIZER)
    assert tokenizer.encode("a") == [0]
    assert tokenizer.surrounded([0, 0]) == [1, 0, 0]
    assert [tokenizer.token_string(id) for id in (0, 1, 2)] == ["a", "<s>", ""]


# ---- an operator --------------------------------------------------------------------------------------------------


async def test_the_roles(autojump_clock, clients):
    routes = clients.server.connections._routes
    operators = {path for path, route in routes.items() if route.role is Role.OPERATOR}
    power = {"/sleep", "/wake_up", "/wakeup", "/update_weights", "/is_sleeping"}
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert operators == {"/debug/invariants", "/abort_request"} | adapters | power
    anyone = {path for path, route in routes.items() if route.role is Role.ANYONE}
    assert anyone == {"/", "/docs", "/openapi.json", "/health", "/ready"}


KEYS = {"api_key": ("user",), "admin_key": ("operator",)}
WHO = [
    ("GET", "/v1/models/toy", None, (401, 200, 200)),
    ("POST", CHAT, chat(), (401, 200, 200)),
    ("POST", "/tokenize", {"prompt": "x"}, (401, 200, 200)),
    ("GET", "/debug/invariants", None, (401, 403, 200)),
    ("POST", "/abort_request", {"abort_all": True}, (401, 403, 200)),
]


@pytest.mark.parametrize(("method", "path", "content", "statuses"), WHO)
async def test_who_may(autojump_clock, method, path, content, statuses):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, **KEYS)
        for key, status in zip(("nobody", "user", "operator"), statuses, strict=True):
            answer = await clients.request(method, path, content, authorization=f"Bearer {key}")
            assert (key, answer.status) == (key, status)


async def test_invariants_hold_while_requests_run(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, max_tokens=100))
        await client.head()
        answer = await clients.request("GET", "/debug/invariants")
        assert (answer.status, answer.json["ok"]) == (200, True)
        statistics = answer.json["statistics"]
        assert (statistics["running"], statistics["sessions"], statistics["power"]) == (1, 1, "awake")
        assert answer.json["tasks"] > 5
        await client.rest()


async def test_invariants_that_do_not_hold(autojump_clock, clients, monkeypatch):
    async def check():
        raise InvariantError("one is missing")

    monkeypatch.setattr(clients.engine, "check_invariants", check)
    answer = await clients.request("GET", "/debug/invariants")
    assert (answer.status, answer.error["code"]) == (500, "invariant_violated")
    assert answer.error["message"] == "one is missing"
    monkeypatch.undo()


async def test_invariants_without_a_worker(autojump_clock, clients):
    clients.simulation.worker.exit(-9)
    await clients.engine.runtime.gate.changed()
    assert (await clients.request("GET", "/debug/invariants")).status == 503
    await clients.engine.ready()


async def streaming(client, content):
    """A stream whose first piece has come, and its id."""
    await client.send("POST", CHAT, chat(content, stream=True, max_tokens=400))
    await client.head()
    return events_of(await client.piece())[0]["id"]


async def test_abort_one(autojump_clock, clients):
    async with clients.connect() as one, clients.connect() as other:
        id = await streaming(one, "hello")
        await streaming(other, "you")
        answer = await clients.request("POST", "/abort_request", {"request_id": id})
        assert (answer.status, answer.json) == (200, {"aborted": 1})
        *_, error, done = events_of(await one.rest())
        assert (error["error"]["code"], done) == ("aborted", "[DONE]")
        assert error["error"]["message"] == "the request was aborted by an operator"
        assert events_of(await other.rest())[-2]["choices"][0]["finish_reason"] == "length"
    assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 0}


async def test_abort_a_response(autojump_clock, clients):
    """Of the conversation, and one beside it; the connection lives."""
    fields = {"max_output_tokens": 400, "ignore_eos": True}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "alone"}]}
    beside = {"conversation": "none", "input": [item]}
    async with clients.realtime() as client:
        for more in ({}, beside):
            await client.say("hello")
            await client.send("response.create", response=fields | more)
            id = (await client.until("response.output_text.delta"))["response_id"]
            answer = await clients.request("POST", "/abort_request", {"request_id": id})
            assert (answer.status, answer.json) == (200, {"aborted": 1})
            response = (await client.until("response.done"))["response"]
            assert (response["id"], response["status"]) == (id, "cancelled")
            assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 0}
        assert (await client.ask("and now?", max_output_tokens=3))["status"] == "incomplete"


@pytest.mark.parametrize("where", ["header", "body"])
async def test_abort_one_that_is_whole(autojump_clock, clients, where):
    """Its client hears of our id only with the answer, and has chosen one."""
    async with clients.connect() as client:
        more = {"request_id": "my own"} if where == "body" else {}
        headers = {"x-request-id": "mine"} if where == "header" else {}
        id = "my own" if where == "body" else "mine"
        await client.send("POST", CHAT, chat(max_tokens=400, **more), **headers)
        await wait_all_tasks_blocked()
        assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 1}
        assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 0}
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "aborted")
        assert not len(clients.server.in_flight)


async def test_abort_all_of_one_id(autojump_clock, clients):
    """Requests of several clients may have the same one, in the header or in the body."""
    async with clients.connect() as one, clients.connect() as other, clients.connect() as third:
        await one.send("POST", CHAT, chat(max_tokens=400), **{"x-request-id": "same"})
        await other.send("POST", CHAT, chat(max_tokens=400, request_id="same"), **{"x-request-id": "same"})
        await third.send("POST", CHAT, chat(max_tokens=3, request_id="different"))
        await wait_all_tasks_blocked()
        assert (await clients.request("POST", "/abort_request", {"request_id": "same"})).json == {"aborted": 2}
        assert [(await client.answer()).status for client in (one, other, third)] == [500, 500, 200]
        assert not len(clients.server.in_flight)


async def test_an_id_that_its_client_did_not_choose(autojump_clock, clients):
    """The one that the response has in its header."""
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat("hello", stream=True, max_tokens=400))
        id = (await client.head())[1]["x-request-id"]
        assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 1}
        assert events_of(await client.rest())[-2]["error"]["code"] == "aborted"


async def test_each_request_of_a_connection_has_its_own_id(autojump_clock, clients):
    async with clients.connect() as client:
        for id in ("first", "second"):
            await client.send("POST", CHAT, chat(max_tokens=400), **{"x-request-id": id})
            await wait_all_tasks_blocked()
            other = "first" if id == "second" else "second"
            assert (await clients.request("POST", "/abort_request", {"request_id": other})).json == {"aborted": 0}
            assert (await clients.request("POST", "/abort_request", {"request_id": id})).json == {"aborted": 1}
            assert (await client.answer()).error["code"] == "aborted"


async def test_abort_all_and_the_line(autojump_clock):
    """A program that embeds the engine waits in line beside the server's requests."""
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        for _ in range(3):
            nursery.start_soon(lambda: engine.generate("hello", ENDLESS))
        await wait_all_tasks_blocked()
        assert (await clients.request("POST", "/abort_request", {"abort_all": True})).json == {"aborted": 3}
        assert len(engine.runtime.gate.requests) == 0


async def test_abort_all(autojump_clock, clients):
    async with clients.connect() as one, clients.connect() as other, clients.realtime() as realtime:
        for client, content in ((one, "hello"), (other, "you")):
            await streaming(client, content)
        await realtime.say("hello")
        await realtime.send("response.create", response={"max_output_tokens": 400, "ignore_eos": True})
        await realtime.until("response.output_text.delta")
        answer = await clients.request("POST", "/abort_request", {"abort_all": True})
        assert answer.json == {"aborted": 3}
        for client in (one, other):
            assert events_of(await client.rest())[-2]["error"]["code"] == Cause.ABORT_ALL.value
        response = (await realtime.until("response.done"))["response"]
        assert response["status_details"]["error"]["code"] == Cause.ABORT_ALL.value
