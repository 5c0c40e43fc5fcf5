"""Reasoning is split off: whole and streamed, beside tools, grammars, stop strings and log-probabilities.

The toy model's answers have no tags, so parts of its text are taken as the tags.
"""

import json

import pytest
from helpers.clients import chat, open_clients

from trioengine.serve import chat as chat_module
from trioengine.serve.asked_model import ServedNames
from trioengine.serve.chat_request import ServedModel, parse_chat_request
from trioengine.text.reasoning import REASONING_FORMS, ReasoningForm

LONG = {"max_tokens": 40}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture
async def plain(autojump_clock):
    """The answer without a parser."""
    async with open_clients() as clients:
        (choice,) = (await clients.chat(**LONG)).json["choices"]
        return choice["message"]["content"]


@pytest.fixture
def tags(plain, monkeypatch):
    """The first characters, and the first three that do not come before."""
    at = next(at for at in range(10, len(plain)) if plain.index(plain[at : at + 3]) == at)
    form = ReasoningForm(plain[:2], plain[at : at + 3])
    monkeypatch.setitem(REASONING_FORMS, "qwen3", form)
    return form


@pytest.fixture
async def clients(tags):
    async with open_clients(reasoning_parser="qwen3") as clients:
        yield clients


async def streamed(clients, **fields):
    """The reasoning, the content and the finish reason of a streamed answer, and its events."""
    events = (await clients.chat(stream=True, stream_options={"include_usage": True}, **fields)).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    return *["".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "content")], events


async def check(clients, reasoning, content, **fields):
    """Whole and streamed; returns the whole choice and its usage."""
    whole = (await clients.chat(**fields)).json
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == message.get("reasoning")
    *found, events = await streamed(clients, **fields)
    assert found == [reasoning, content]
    assert events[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    return choice, whole["usage"]


async def test_whole_and_streamed(autojump_clock, clients, plain, tags):
    reasoning, _, answer = plain[2:].partition(tags.end)
    choice, usage = await check(clients, reasoning, answer, **LONG)
    assert choice["finish_reason"] == "length"
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    head = (await clients.chat(max_tokens=count)).json["choices"][0]["message"]
    assert (head["reasoning"], answer.startswith(head["content"])) == (reasoning, True)
    before = (await clients.chat(max_tokens=count - 1)).json["choices"][0]["message"]
    assert before["content"] == "" and before["reasoning"].startswith(reasoning)


async def test_a_reasoning_that_is_cut(autojump_clock, clients, plain):
    _, usage = await check(clients, plain[2:8], "", stop=[plain[8:11]], **LONG)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


async def test_a_reasoning_that_the_prompt_opens(autojump_clock, plain, tags, monkeypatch):
    monkeypatch.setitem(REASONING_FORMS, "deepseek_r1", ReasoningForm("assistant", tags.end))
    async with open_clients(reasoning_parser="deepseek_r1") as clients:
        reasoning, _, answer = plain.partition(tags.end)
        await check(clients, reasoning, answer, **LONG)
        await check(clients, plain[:5], "", stop=[plain[5:8]], **LONG)


async def test_log_probabilities(autojump_clock, clients):
    fields = {"logprobs": True, **LONG}
    whole = (await clients.chat(**fields)).json["choices"][0]["logprobs"]["content"]
    *_, events = await streamed(clients, **fields)
    found = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    assert [each for logprobs in found if logprobs for each in logprobs["content"]] == whole


async def test_a_grammar_holds_from_the_first_token(autojump_clock, clients, plain):
    for fields in ({}, {"tools": [CLOCK]}):
        answer = (await clients.chat(structured_outputs={"choice": [plain]}, **LONG, **fields)).json
        assert answer["choices"][0]["message"]["content"] == plain[: len(answer["choices"][0]["message"]["content"])]
        assert "reasoning" not in answer["choices"][0]["message"]
        assert "completion_tokens_details" not in answer["usage"]


async def test_a_history_with_reasoning(autojump_clock, clients):
    """The toy's template does not print it."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    plain = await clients.chat(messages=[user, answer, user])
    for name in ("reasoning_content", "reasoning"):
        same = await clients.chat(messages=[user, {**answer, name: "why"}, user])
        assert same.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]


async def test_off_by_default(autojump_clock, plain):
    async with open_clients() as clients:
        answer = (await clients.chat(**LONG)).json
        assert answer["choices"][0]["message"].keys() == {"role", "content", "refusal"}
        assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_templates_that_print_reasoning_get_it(name):
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "why"}
    body = json.dumps(chat(messages=[user, answer])).encode()
    model = ServedModel(ServedNames("toy", {}), "", "{{ message.reasoning_content }}")
    assert parse_chat_request(body, model).messages[1] == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "why",
    }


async def test_a_continued_message_that_has_opened_it(autojump_clock, plain, tags, monkeypatch):
    monkeypatch.setitem(REASONING_FORMS, "deepseek_r1", ReasoningForm("[", "]"))
    fields = {"add_generation_prompt": False, "continue_final_message": True, **LONG}
    async with open_clients(reasoning_parser="deepseek_r1") as clients:
        for content in ("[hm", "[hm] so"):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            message = (await clients.chat(messages=messages, **fields)).json["choices"][0]["message"]
            assert ("reasoning" in message) is (content == "[hm")


async def test_a_long_answer_is_counted_in_a_thread(autojump_clock, clients, plain, tags, monkeypatch):
    """With a low limit: the count is the same."""
    short = (await clients.chat(**LONG)).json["usage"]["completion_tokens_details"]
    monkeypatch.setattr(chat_module, "MANY_TOKENS", 1)
    reasoning, _, answer = plain[2:].partition(tags.end)
    _, usage = await check(clients, reasoning, answer, **LONG)
    assert usage["completion_tokens_details"] == short
