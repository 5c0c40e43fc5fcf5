"""Chat completions on the simulated worker: whole and streamed."""

import gc
import json
import logging

import trio
from helpers.clients import CHAT, chat, events_of
from trio.testing import wait_all_tasks_blocked

from trioengine.actors.admission import _Entry
from trioengine.actors.generation import Generation
from trioengine.serve.body import Body
from trioengine.serve.chat import _ChatCompletion
from trioengine.serve.chat_request import ChatRequest
from trioengine.serve.http import HttpRequest
from trioengine.testing import toy_answer
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
    assert shown.pop("system_fingerprint").startswith("fp_")
    assert shown == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": clients.engine.tokenizer.decode(ids), "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
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
    assert choices[-1] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
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
    """With the head comes the first delta, with the last one the end; each piece holds whole events."""
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True))
        await client.head()
        pieces = []
        while (piece := await client.piece()) is not None:
            pieces.append(events_of(piece))
    assert pieces[-1].pop() == "[DONE]"
    contents = [[event["choices"][0]["delta"].get("content") for event in piece] for piece in pieces]
    assert contents[0][0] == ""
    assert [len(piece) for piece in contents] == [2, 1, 1, 1, 2]
    assert contents[-1][0] and contents[-1][1] is None


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
        "cache_salt": "mine",
        "num_speculative_tokens": 6,
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
        await client.send("POST", CHAT, chat("hello", max_tokens=400))
        await wait_all_tasks_blocked()
        assert clients.engine.statistics().running + clients.engine.statistics().waiting == 1
        gc.collect()  # the garbage of other tests
        objects = gc.get_objects()
        assert not [entry for entry in objects if type(entry) is ChatRequest]
        assert not [entry for entry in objects if type(entry) is HttpRequest and entry.body]
        (answer,) = (entry for entry in objects if type(entry) is _ChatCompletion)
        assert not answer._prompts
        assert not [entry for entry in objects if type(entry) is _Entry]
        (generation,) = (entry for entry in objects if type(entry) is Generation)
        assert generation._enter is None


async def test_nothing_of_it_is_logged(autojump_clock, clients, caplog):
    caplog.set_level(logging.DEBUG, "trioengine")
    await clients.chat("a secret", stream=True)
    await clients.chat("a secret")
    assert "secret" not in caplog.text


async def test_nothing_of_a_stream_waits_for_the_garbage_collector(autojump_clock, clients):
    gc.collect()
    gc.disable()
    try:
        await clients.chat("a", stream=True, max_tokens=20)
        assert not [entry for entry in gc.get_objects() if type(entry) in (_ChatCompletion, Body, Generation)]
    finally:
        gc.enable()


async def test_a_token_that_a_socket_takes_wakes_no_task(autojump_clock, clients, monkeypatch):
    """The stream's task sends the first piece with the head, the last piece, the last events, and the body's end."""
    by_the_task = []

    async def send(self, piece, *, is_last=False, send=Body.send):
        by_the_task.append(piece)
        await send(self, piece, is_last=is_last)

    monkeypatch.setattr(Body, "send", send)
    ours, theirs = trio.socket.socketpair()
    async with clients.connect(trio.SocketStream(ours), trio.SocketStream(theirs)) as client:
        await client.send("POST", CHAT, chat("hello", stream=True, max_tokens=20, ignore_eos=True))
        await client.head()
        events = events_of(await client.rest())
    assert len(events) > 20
    assert len(by_the_task) <= 4
