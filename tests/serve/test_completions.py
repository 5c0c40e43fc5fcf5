"""Completions of prompts without a chat template: texts and token ids, one or several, whole and streamed."""

import pytest
import trio
from helpers.clients import events_of, first_token, open_clients

from trioengine import EngineConfig
from trioengine.testing import toy_answer

PATH = "/v1/completions"
FIELDS = {"model": "toy", "temperature": 0, "max_tokens": 5, "ignore_eos": True}


def expected(engine, prompt, max_tokens=5):
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return engine.tokenizer.decode(toy_answer(ids, max_tokens, ignore_eos=True))


PROMPTS = [
    ("to be", ["to be"]),
    ([116, 111], [[116, 111]]),
    (["to be", "or not", "to be"], ["to be", "or not", "to be"]),
    ([[116], [111, 112]], [[116], [111, 112]]),
    (["a"] * 20, ["a"] * 20),
]


@pytest.mark.parametrize(("prompt", "each"), PROMPTS, ids=range(len(PROMPTS)))
async def test_whole_answers(autojump_clock, clients, prompt, each):
    """Also more of them than the engine runs at a time."""
    answer = await clients.request("POST", PATH, {**FIELDS, "prompt": prompt})
    assert answer.status == 200
    found = answer.json
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-") and found["model"] == "toy"
    assert found["choices"] == [
        {
            "index": index,
            "text": expected(clients.engine, one),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        for index, one in enumerate(each)
    ]
    assert found["usage"]["completion_tokens"] == 5 * len(each)
    assert found["usage"]["prompt_tokens"] == sum(map(len, each))


@pytest.mark.parametrize(("prompt", "each"), PROMPTS, ids=range(len(PROMPTS)))
async def test_streamed_answers(autojump_clock, clients, prompt, each):
    fields = {**FIELDS, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = (await clients.request("POST", PATH, fields)).events
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5 * len(each))
    texts, reasons = {}, {}
    for event in events:
        assert event["usage"] is None
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {index: expected(clients.engine, one) for index, one in enumerate(each)}
    assert reasons == dict.fromkeys(range(len(each)), "length")


async def test_defaults(autojump_clock, clients):
    answer = await clients.request("POST", PATH, {"prompt": "a", "ignore_eos": True, "seed": 1})
    assert answer.json["usage"]["completion_tokens"] == 16


async def test_a_grammar(autojump_clock, clients):
    fields = {**FIELDS, "prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = (await clients.request("POST", PATH, fields)).json["choices"]
    assert choice["text"] in ("yes", "no") and choice["finish_reason"] == "stop"


async def test_a_client_that_leaves_ends_all(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", PATH, {**FIELDS, "prompt": ["a", "b", "c"], "max_tokens": 400, "stream": True})
        await first_token(clients.engine)
        await trio.aclose_forcefully(client.stream)
    await clients.everything_is_given_back()
    assert clients.engine.statistics().aborted == 3


async def test_an_abort_by_id_ends_all(autojump_clock, clients):
    async with clients.connect() as client:
        fields = {**FIELDS, "prompt": ["a", "b"], "max_tokens": 400, "request_id": "mine"}
        await client.send("POST", PATH, fields)
        await first_token(clients.engine)
        aborted = await clients.request("POST", "/abort_request", {"request_id": "mine"})
        assert aborted.json == {"aborted": 2}
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "aborted")


async def test_several_prompts_wait_behind_the_first(autojump_clock):
    """In whatever order their tasks run: a server with room for the first refuses none."""
    config = EngineConfig(model="toy", max_sessions=2)
    async with open_clients(config) as clients:
        for _ in range(10):
            answer = await clients.request("POST", PATH, {**FIELDS, "prompt": ["a", "b", "c", "d"]})
            assert (answer.status, len(answer.json["choices"])) == (200, 4)


async def test_one_that_fails_ends_all(autojump_clock, clients):
    """In a stream that has begun the error is the last event, and whole."""
    async with clients.connect() as client:
        fields = {**FIELDS, "prompt": ["a", "b", "c"], "max_tokens": 400, "stream": True}
        await client.send("POST", PATH, fields)
        await client.head()
        await first_token(clients.engine)
        assert next(filter(clients.engine.abort, range(1, 10)))  # one of the requests
        *_, error, done = events_of(await client.rest())
        assert (error["error"]["code"], done) == ("aborted", "[DONE]")
    await clients.everything_is_given_back()


@pytest.mark.parametrize("slots", [{"max_sessions": 2}, {"max_num_seqs": 1, "max_num_queued_reqs": 0}])
async def test_a_sleep_ends_prompts_that_wait(autojump_clock, slots):
    """The error is that of an abort, also if a prompt that waits for a slot is the first to get it."""
    async with open_clients(EngineConfig(model="toy", **slots)) as clients:
        async with clients.connect() as client:
            await client.send("POST", PATH, {**FIELDS, "prompt": ["a", "b", "c"], "max_tokens": 400})
            await first_token(clients.engine)
            await clients.engine.sleep(mode="abort")
            answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "sleep")
        await clients.everything_is_given_back()


REFUSED = [
    ({"prompt": [[3], [4], [1] * 600], "stream": True}, "context_length_exceeded", "prompt[2]"),
    ({"prompt": ["a", ""]}, "empty_prompt", "prompt[1]"),
    ({"prompt": [[3], [100_000]]}, "invalid_value", "prompt[1]"),
    ({}, "missing_parameter", "prompt"),
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
    ({"prompt": [-1]}, "invalid_value", "prompt[0]"),
    ({"prompt": [100_000]}, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
    ({"prompt": "a" * 600}, "context_length_exceeded", "prompt"),
    ({"prompt": "a", "n": 17}, "invalid_value", "n"),
    ({"prompt": ["a"] * 65, "n": 2}, "invalid_value", "prompt"),
    ({"prompt": "a", "echo": 1}, "invalid_type", "echo"),
    ({"prompt": "a", "logprobs": True}, "invalid_type", "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "invalid_value", "logprobs"),
    ({"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0, "logprobs": 1, "echo": False}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": -1, "echo": True}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, "invalid_value", "n"),
    ({"prompt": "a", "logprobs": 0, "echo": True, "n": 2}, "invalid_value", "n"),
    ({"prompt": "a", "prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
    ({"prompt": "a", "stream_options": {}}, "invalid_value", "stream_options"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_prompts_that_are_refused(autojump_clock, clients, fields, code, param):
    answer = await clients.request("POST", PATH, fields)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert param in answer.error["message"]


async def test_unknown_fields(autojump_clock, clients):
    answer = await clients.request("POST", PATH, {**FIELDS, "prompt": "a", "mood": 1, "user": "me"})
    assert (answer.status, answer.headers["x-unknown-fields"]) == (200, "mood")
