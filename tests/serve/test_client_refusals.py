"""trioengine.connect: refusals by the client and by the server, after which the session goes on."""

import pytest
from helpers.clients import open_clients
from helpers.params import GREEDY, LONG
from helpers.realtime_texts import assistant, reference, user

from trioengine import (
    Grammar,
    RequestRejected,
    SamplingParams,
    connect,
)

BAD_PROMPTS = [
    ([None], "invalid_value", "prompt[0]"),
    ([1, 2], "invalid_value", "prompt[0]"),
    ([{"role": "developer", "content": "x"}], "invalid_value", "prompt[0].role"),
    ([{"role": "tool", "content": "x"}], "invalid_value", "prompt[0].tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": ""}], "invalid_value", "prompt[0].tool_call_id"),
    ([{"role": "tool", "content": None, "tool_call_id": "c"}], "invalid_value", "prompt[0].content"),
    ([{"role": "user", "content": "x", "tool_calls": []}], "invalid_value", "prompt[0].tool_calls"),
    ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "invalid_value", "prompt[0].tool_calls[0].id"),
    ("x" * 9999, "context_length_exceeded", "prompt"),
    ("x" * (1 << 20), "too_large", "prompt"),
]


@pytest.mark.parametrize(("prompt", "code", "param"), BAD_PROMPTS, ids=[f"{str(bad[0])[:40]!r}" for bad in BAD_PROMPTS])
async def test_a_prompt_that_cannot_be_sent_is_refused_alone(autojump_clock, remote, clients, prompt, code, param):
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected) as refused:
            await session.ask(prompt, GREEDY)
        assert (refused.value.code, refused.value.param) == (code, param)
        assert session.history == []
        assert (await session.ask("hello", GREEDY)).text == reference(clients, [user("hello")])


@pytest.mark.parametrize(("prompt", "place"), [("half \ud800", "prompt"), ([user("half \ud800")], "prompt[0].content")])
async def test_the_servers_error_names_the_argument_of_the_call(autojump_clock, remote, prompt, place):
    with pytest.raises(RequestRejected) as refused:
        await remote.generate(prompt, GREEDY)
    assert refused.value.message == f"{place} has half of a surrogate pair"


async def test_a_prompt_that_is_refused_in_the_middle_is_taken_back(autojump_clock, remote, clients):
    """The server has its first message by then, and may have begun to answer."""
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected):
            async with session.generate([user("hello"), user("\ud800")], LONG) as generation:
                await generation.result()
        assert session.history == []
        async with session.generate("hello", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("hello")])


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([user("\ud800"), user("x" * 4000)], "invalid_value"),
        ([user("x" * 4000), user("\ud800")], "conversation_too_large"),
    ],
)
async def test_of_several_refused_messages_the_first_is_named(autojump_clock, prompt, code):
    async with (
        open_clients(max_conversation_size=3000) as clients,
        connect("ws://localhost", dial=clients.dial) as client,
        client.open_session() as session,
    ):
        with pytest.raises(RequestRejected) as refused:
            await session.ask(prompt, GREEDY)
        assert refused.value.code == code
        assert (await session.ask("hello", GREEDY)).text == reference(clients, [user("hello")])


@pytest.mark.parametrize("prompt", [None, 5, b"x", {}], ids=repr)
async def test_what_is_no_prompt_is_refused_at_entering(autojump_clock, remote, prompt):
    async with remote.open_session() as session:
        generation = session.generate(prompt, GREEDY)
        with pytest.raises(RequestRejected, match=f"must be a string or messages, got {type(prompt).__name__}"):
            await generation.__aenter__()
    with pytest.raises(RequestRejected, match="must be a string or messages"):
        await remote.generate(prompt)


BAD_HISTORY = [user("hello"), assistant("half \ud800"), user("more")]


async def test_a_replaced_history_that_the_server_refuses_fails_the_requests_on_it(autojump_clock, remote, clients):
    async with remote.open_session(history=[user("hello"), assistant("hi")]) as session:
        session.replace_history(BAD_HISTORY)
        for _ in range(2):
            with pytest.raises(RequestRejected, match=r"history\[1\]"):
                async with session.generate("more", GREEDY):
                    pass
        session.replace_history([user("other")])
        async with session.generate("more", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("other"), user("more")])


async def test_a_grammar_is_refused(autojump_clock, remote):
    with pytest.raises(RequestRejected, match="grammar cannot be sent over a connection") as refused:
        await remote.generate("hello", grammar=Grammar.json_object())
    assert refused.value.param == "grammar"


async def test_variables_and_adapters_are_refused(autojump_clock, remote):
    with pytest.raises(RequestRejected, match="chat_template_kwargs cannot be sent over a connection"):
        remote.open_session(chat_template_kwargs={"tools": []})
    with pytest.raises(RequestRejected, match="adapter is a part of the model's name over a connection"):
        remote.open_session(adapter="sql")
    with pytest.raises(RequestRejected, match="adapter is a part of the model's name"):
        await remote.generate("hello", adapter="sql")


async def test_logprobs_are_refused(autojump_clock, remote):
    with pytest.raises(RequestRejected) as refused:
        await remote.generate("hello", SamplingParams(logprobs=1))
    assert refused.value.param == "logprobs"


async def test_tools_that_are_too_large_are_refused_before_anything_is_sent(autojump_clock, remote):
    async with remote.open_session() as session:
        tools = [{"name": "a", "description": "x" * (1 << 20)}]
        with pytest.raises(RequestRejected, match=r"tools: .* too large") as caught:
            await session.ask("hello", tools=tools)
        assert caught.value.param == "tools"
        assert (await session.ask("hello", max_tokens=2)).usage.prompt_tokens > 0
        assert len(session.history) == 2
