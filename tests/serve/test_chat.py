"""Chat completions on the simulated worker: whole and streamed, and what goes wrong."""

import gc
import json
import logging

import pytest
import trio
from clients import CHAT, Clients, chat, events_of
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.lifecycle import Cause, PowerEvent
from trioengine.serve.http import Request
from trioengine.serve.openai.chat import _Answer
from trioengine.serve.openai.chat_request import ChatRequest
from trioengine.testing import simulated_engine, toy_answer
from trioengine.testing.toy_model import toy_logprobs


def reference(engine, messages, max_tokens):
    """What the toy model answers."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    prompt = engine.tokenizer.apply_chat_template(messages)
    return prompt, toy_answer(prompt, max_tokens, ignore_eos=True)


async def test_a_whole_answer(autojump_clock, clients):
    answer = await clients.chat()
    prompt, ids = reference(clients.engine, "hello", 5)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    shown = answer.json
    assert shown.pop("id").startswith("chatcmpl-")
    assert isinstance(shown.pop("created"), int)
    assert shown == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": clients.engine.tokenizer.decode(ids), "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_the_prefix_cache_shows_in_the_usage(autojump_clock, clients):
    await clients.chat()
    assert (await clients.chat()).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stream(autojump_clock, clients):
    answer = await clients.chat(stream=True)
    _, ids = reference(clients.engine, "hello", 5)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["transfer-encoding"] == "chunked"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "toy")}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None and choice["index"] == 0 for choice in choices[:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == clients.engine.tokenizer.decode(ids)
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_stream_with_usage(autojump_clock, clients):
    answer = await clients.chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["id"] == chunks[0]["id"]
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 5


async def test_a_chunk_is_sent_at_once_for_each_step(autojump_clock, clients):
    """With the head comes the first delta; each piece holds whole events."""
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True))
        await client.head()
        pieces = []
        while (piece := await client.piece()) is not None:
            pieces.append(events_of(piece))
    contents = [[event["choices"][0]["delta"].get("content") for event in piece] for piece in pieces[:-1]]
    assert len(contents) == 5
    assert contents[0][0] == ""
    assert all(len(piece) == 1 for piece in contents[1:])
    assert pieces[-1][-1] == "[DONE]"


async def test_texts_are_any_unicode(autojump_clock, clients):
    """The frames are ASCII: no line separator of any kind splits them."""
    content = 'ä€😀\u2028"\\\n\x00'
    answer = await clients.chat(content, stream=True)
    assert answer.body.isascii()
    _, ids = reference(clients.engine, content, 5)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == clients.engine.tokenizer.decode(ids)


ROLES = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    {"role": "assistant", "content": "yes?", "refusal": None, "tool_calls": [], "annotations": []},
    {"role": "user", "content": "go on"},
]


async def test_roles_and_parts(autojump_clock, clients):
    answer = await clients.chat(messages=ROLES)
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go on"},
    ]
    prompt, ids = reference(clients.engine, plain, 5)
    assert answer.json["usage"]["prompt_tokens"] == len(prompt)
    assert answer.json["choices"][0]["message"]["content"] == clients.engine.tokenizer.decode(ids)


async def test_stop_strings(autojump_clock, clients):
    text = (await clients.chat(max_tokens=30)).json["choices"][0]["message"]["content"]
    for stop in (text[10:12], [text[10:12], "§"]):
        choice = (await clients.chat(max_tokens=30, stop=stop)).json["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(text[10:12])]
        answer = await clients.chat(max_tokens=30, stop=stop, stream=True)
        deltas = [event["choices"][0] for event in answer.events[:-1]]
        assert "".join(delta["delta"].get("content", "") for delta in deltas) == choice["message"]["content"]
        assert deltas[-1]["finish_reason"] == "stop"


async def test_an_end_token_stops(autojump_clock, clients):
    choice = (await clients.chat(max_tokens=300, ignore_eos=False)).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "<|im_end|>" not in choice["message"]["content"]


async def test_parameters_reach_the_worker(autojump_clock, clients):
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 42,
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"65": -1},
        "skip_special_tokens": False,
    }
    body = chat(**fields)
    body["max_completion_tokens"] = body.pop("max_tokens")
    assert (await clients.request("POST", CHAT, body)).status == 200
    (message,) = (m for m in clients.simulation.worker.received if type(m).__name__ == "AddMessage")
    params = message.params
    assert params.max_tokens == 5
    assert params.logit_bias == {65: -1}
    assert params.stop_token_ids == (3,)
    for name in fields.keys() - {"logit_bias", "stop_token_ids"}:
        assert getattr(params, name) == fields[name]


IGNORED = {
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "x",
    "metadata": {"a": "b"},
    "store": False,
    "n": 1,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "service_tier": "auto",
    "stream": False,
    "logprobs": False,
}


async def test_what_is_ignored_changes_nothing(autojump_clock, clients):
    plain = (await clients.chat()).json["choices"]
    assert (await clients.chat(**IGNORED)).json["choices"] == plain
    nulls = dict.fromkeys([*IGNORED, "audio", "top_logprobs", "stop", "seed", "stream_options", "no_such_field"])
    assert (await clients.chat(**nulls)).json["choices"] == plain
    body = chat()
    del body["model"]
    assert (await clients.request("POST", CHAT, body)).json["choices"] == plain


async def test_logprobs(autojump_clock, clients):
    _, ids = reference(clients.engine, "hello", 5)
    answer = await clients.chat(logprobs=True, top_logprobs=3)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for entry, token_id in zip(content, ids, strict=True):
        assert entry["bytes"] == [token_id]
        assert entry["token"] == chr(token_id)
        best = toy_logprobs(token_id, 3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == list(best.values())
        assert entry["logprob"] == best[token_id]
    streamed = [
        entry
        for event in (await clients.chat(logprobs=True, top_logprobs=3, stream=True)).events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_logprobs_alone(autojump_clock, clients):
    content = (await clients.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 5


async def test_many_logprobs_are_rendered_in_a_thread(autojump_clock, clients):
    answer = await clients.chat(logprobs=True, top_logprobs=20, max_tokens=100)
    assert len(answer.json["choices"][0]["logprobs"]["content"]) == 100


# ---- what is refused ----------------------------------------------------------------------------------------------

REFUSED = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"model": 1}, 400, "invalid_type", "model"),
    ({"messages": None}, 400, "missing_parameter", "messages"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hello"}, 400, "invalid_value", "messages"),
    ({"messages": ["hello"]}, 400, "invalid_type", "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, 400, "unsupported_parameter", "messages[0].name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        400,
        "invalid_type",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        400,
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 4_000_000}]}, 400, "context_length_exceeded", "messages"),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"temperature": float("1e999")}, 400, "invalid_json", None),
    ({"top_p": 2}, 400, "invalid_value", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
    ({"max_completion_tokens": 5}, 400, "invalid_value", "max_completion_tokens"),
    ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    ({"stop_token_ids": [100_000]}, 400, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logprobs": 1}, 400, "invalid_type", "logprobs"),
    ({"top_logprobs": 1}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"n": True}, 400, "unsupported_parameter", "n"),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"stream": False, "stream_options": {}}, 400, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, 400, "invalid_type", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "unsupported_parameter", "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "invalid_type", "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "unsupported_parameter",
        "stream_options.include_obfuscation",
    ),
    ({"store": True}, 400, "unsupported_parameter", "store"),
    ({"metadata": {"a": 1}}, 400, "invalid_value", "metadata"),
    ({"user": 1}, 400, "invalid_type", "user"),
    ({"tools": [{}]}, 400, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"functions": []}, 400, "unsupported_parameter", "functions"),
    ({"reasoning_effort": "low"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"best_of": 1}, 400, "unsupported_parameter", "best_of"),
    ({"chat_template": "x"}, 400, "unsupported_parameter", "chat_template"),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused(autojump_clock, clients, caplog, fields, status, code, param):
    """Alike with and without stream; the connection goes on, and the engine has heard of it at most as rejected."""
    for stream in (False, True) if "stream" not in fields else (fields["stream"],):
        async with clients.connect() as client:
            answer = await client.request("POST", CHAT, chat(**{"stream": stream, **fields}))
            assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
            assert answer.error["type"] == "invalid_request_error"
            assert param is None or param in answer.error["message"]
            assert (await client.request("GET", "/health")).status == 200
    assert not caplog.records


BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"n": NaN}', "invalid_json"),
    (b'{"n": ' + b"1" * 5000 + b"}", "invalid_json"),
    ('{"user": "ä"}'.encode("latin-1"), "invalid_json"),
    ('{"user": "ä"}'.encode("utf-16"), "invalid_json"),
    (b'"hello"', "invalid_type"),
    (b"[]", "invalid_type"),
]


@pytest.mark.parametrize(("body", "code"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize", "/abort_request"])
async def test_bodies_that_are_no_json_object(autojump_clock, clients, path, body, code):
    answer = await clients.request("POST", path, body)
    assert (answer.status, answer.error["code"]) == (400, code)


async def test_a_method_that_is_not_allowed(autojump_clock, clients):
    answer = await clients.request("GET", CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_a_template_that_cannot_render(autojump_clock, clients, monkeypatch):
    template = clients.engine.tokenizer._template
    monkeypatch.setattr(template, "_template", type(template)("{{ raise_exception('no') }}")._template)
    answer = await clients.chat()
    assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "template_error", "messages")


async def test_a_body_that_is_too_large(autojump_clock, clients):
    answer = await clients.request("POST", CHAT, b" " * ((4 << 20) + 1))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_a_long_body_is_parsed_in_a_thread(autojump_clock, clients):
    """So is its prompt: the passes of the simulated thread go by."""
    clients.simulation.thread_passes = 50
    answer = await clients.request("POST", CHAT, json.dumps(chat()).encode() + b" " * (70 << 10))
    assert answer.status == 200


# ---- what goes wrong ----------------------------------------------------------------------------------------------

LONG = {"max_tokens": 400}


async def first_piece(client, **fields):
    """A stream whose first piece has come."""
    await client.send("POST", CHAT, chat(stream=True, **LONG | fields))
    status, _ = await client.head()
    assert status == 200
    return await client.piece()


async def rest(client):
    """The events of the rest of a stream."""
    return events_of(await client.rest())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_says_429(autojump_clock, stream):
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=1)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as one, clients.connect() as two:
            for client in (one, two):
                await client.send("POST", CHAT, chat(**LONG))
            await wait_all_tasks_blocked()
            answer = await clients.chat(stream=stream)
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "overloaded")
            assert (await one.answer()).status == (await two.answer()).status == 200
        await clients.all_closed()
        assert engine.statistics().rejected == 1


@pytest.mark.parametrize("event", [PowerEvent.DRAIN, PowerEvent.CLOSE])
async def test_an_engine_that_ends_says_503(autojump_clock, event):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        engine.gate.change_power(event)
        answer = await clients.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["code"] == "shutting_down"


async def test_a_worker_that_restarts_says_503(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, restart_delays=(3.0,))
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        simulation.worker.exit(-9)
        await engine.gate.changed()
        answer = await clients.chat()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        await engine.ready()
        assert (await clients.chat()).status == 200


async def test_a_worker_that_dies_before_the_first_token(autojump_clock, clients):
    for stream in (False, True):
        async with clients.connect() as client:
            await client.send("POST", CHAT, chat(stream=stream))
            await wait_all_tasks_blocked()
            clients.simulation.worker.exit(-9)
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "worker_lost")
        await clients.engine.ready()


async def test_a_worker_that_dies_in_the_middle(autojump_clock, clients):
    async with clients.connect() as client:
        await first_piece(client)
        clients.simulation.worker.exit(-9)
        *_, error, done = await rest(client)
        assert done == "[DONE]"
        assert error["error"]["code"] == "worker_lost"
    await clients.engine.ready()


async def test_a_request_that_fails_alone(autojump_clock, clients):
    async with clients.connect() as client:
        await first_piece(client)
        (session,) = clients.engine._sessions
        clients.simulation.worker.runner.fail_requests.add(session.generation.request_id)
        *_, error, done = await rest(client)
        assert (error["error"]["code"], done) == ("sampling_failed", "[DONE]")


async def test_a_whole_answer_that_fails(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(**LONG))
        await wait_all_tasks_blocked()
        (session,) = clients.engine._sessions
        clients.simulation.worker.runner.fail_requests.add(session.generation.request_id)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (422, "sampling_failed")


@pytest.mark.parametrize(("cause", "status"), [(Cause.SHUTDOWN, 503), (Cause.ABORT_ALL, 500), (Cause.TIMEOUT, 500)])
async def test_an_abort_is_an_error(autojump_clock, clients, cause, status):
    async with clients.connect() as whole, clients.connect() as early, clients.connect() as middle:
        await first_piece(middle)
        await whole.send("POST", CHAT, chat(**LONG))
        await early.send("POST", CHAT, chat(stream=True, **LONG))
        await wait_all_tasks_blocked()
        clients.engine.abort_all(cause)
        for client in (whole, early):
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (status, cause.value)
        *_, error, done = await rest(middle)
        assert (error["error"]["code"], done) == (cause.value, "[DONE]")
        assert error["error"]["type"] == "server_error"


async def test_a_bug_in_the_middle(autojump_clock, clients, caplog, monkeypatch):
    async with clients.connect() as client:
        await first_piece(client)
        (session,) = clients.engine._sessions
        monkeypatch.setattr(session.generation, "_mailbox", None)
        *_, error, done = await rest(client)
        assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
        assert error["error"]["message"] == "internal error"
    assert caplog.records
    caplog.clear()


async def test_drain_finishes_a_stream(autojump_clock, clients):
    async with clients.connect() as client, trio.open_nursery() as nursery:
        await first_piece(client)
        nursery.start_soon(clients.server.drain)
        events = await rest(client)
        assert (events[-2]["choices"][0]["finish_reason"], events[-1]) == ("length", "[DONE]")


async def test_a_connection_is_used_again(autojump_clock, clients):
    async with clients.connect() as client:
        for stream in (True, False, True):
            answer = await client.request("POST", CHAT, chat(stream=stream))
            assert answer.status == 200
    assert clients.engine.statistics().finished == 3


async def test_an_old_client_reads_until_the_close(autojump_clock, clients):
    stream = clients.stream()
    body = json.dumps(chat(stream=True)).encode()
    head = b"POST %b HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    await stream.send_all(head + body)
    data = b""
    while received := await stream.receive_some():
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events_of(body)[-1] == "[DONE]"


async def test_the_request_is_let_go_of_before_the_first_token(autojump_clock, clients):
    """Its bytes, and what was parsed of them; the engine keeps the one copy that it works on."""
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat("hello", **LONG))
        await wait_all_tasks_blocked()
        assert clients.engine.statistics().running + clients.engine.statistics().waiting == 1
        objects = gc.get_objects()
        assert not [entry for entry in objects if isinstance(entry, ChatRequest)]
        assert not [entry for entry in objects if isinstance(entry, Request) and entry.body]
        (answer,) = (entry for entry in objects if isinstance(entry, _Answer))
        assert not answer._messages
        (session,) = clients.engine._sessions
        assert session.generation.prompt is None


async def test_nothing_of_it_is_logged(autojump_clock, clients, caplog):
    caplog.set_level(logging.DEBUG, "trioengine")
    await clients.chat("a secret", stream=True)
    await clients.chat("a secret")
    assert "secret" not in caplog.text
