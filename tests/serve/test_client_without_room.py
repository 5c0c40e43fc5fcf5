"""trioengine.connect and a server that has no room for bytes: nothing hangs, and no turn is answered in part."""

from contextlib import asynccontextmanager, nullcontext

import pytest
import trio
from helpers.clients import open_clients
from helpers.params import GREEDY
from helpers.realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineOverloaded, SamplingParams, TimedOut, connect

KEY = "k" * 16
OF_ALL = {"max_buffered_bytes": 100_000}
OF_A_KEY = {"max_buffered_bytes_per_key": 100_000, "api_key": (KEY,)}
BUDGETS = [(OF_ALL, "buffers_full"), (OF_A_KEY, "key_buffers_full")]
BIASED = SamplingParams(temperature=0, max_tokens=5, logit_bias=dict.fromkeys(range(20, 220), 0.5))
either_budget = pytest.mark.parametrize(("options", "code"), BUDGETS, ids=[code for _, code in BUDGETS])


@asynccontextmanager
async def narrow(options):
    """A client, and its server with a budget for bytes."""
    async with open_clients(**options) as clients:
        async with connect("ws://localhost", dial=clients.dial, api_key=KEY) as client:
            yield client, clients


@asynccontextmanager
async def room(clients, size):
    """Within, there is room for so many bytes more."""
    await wait_all_tasks_blocked()
    budget = clients.server.budget
    key = next(iter(budget._of_keys), None)  # of a session that has items
    with budget.holding(key) as rest:
        rest.charge(100_000 - size - budget.num_bytes)
        yield


def check_refusal(refusal, code):
    assert (refusal.code, refusal.retry_after) == (code, 1.0)
    assert str(refusal).startswith("the connection to the server is gone: the server buffers at most 100000 bytes (")


@either_budget
@pytest.mark.parametrize("wait", [None, True, False])
async def test_a_question_that_was_dropped_is_not_answered(autojump_clock, options, code, wait):
    """The session is over then, and keeps the turns that were answered."""
    async with narrow(options) as (client, clients), client.open_session() as session:
        answer = (await session.ask("hi", GREEDY)).text
        async with room(clients, 1000):
            with trio.fail_after(5), pytest.raises(EngineOverloaded) as refused:
                await session.ask("y" * 2000, GREEDY, wait=wait)
            check_refusal(refused.value, code)
            await session.ended()
        with trio.fail_after(5), pytest.raises(EngineOverloaded) as refused:
            await session.ask("again", GREEDY)
        check_refusal(refused.value, code)
        assert session.history == [user("hi"), assistant(answer)]
        async with client.open_session(history=session.history) as other:
            expected = reference(clients, [*session.history, user("again")])
            assert (await other.ask("again", GREEDY)).text == expected


@either_budget
async def test_a_response_create_that_was_dropped(autojump_clock, options, code):
    async with narrow(options) as (client, clients), client.open_session() as session:
        await session.ask("hi", GREEDY)
        async with room(clients, 1000):
            with trio.fail_after(5), pytest.raises(EngineOverloaded) as refused:
                await session.ask("hi", BIASED)
            check_refusal(refused.value, code)
        assert len(session.history) == 2


@either_budget
async def test_a_history_that_was_dropped(autojump_clock, options, code):
    async with narrow(options) as (client, clients), client.open_session() as session:
        await session.ask("hi", GREEDY)
        async with room(clients, 1000):
            with trio.fail_after(5), pytest.raises(EngineOverloaded) as refused:
                async with client.open_session(history=[user("z" * 4000), assistant("w")]):
                    pass
            check_refusal(refused.value, code)


PROMPTS = [[user("more")], [user("one"), assistant("two"), user("x" * 200)]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["one", "some"])
@pytest.mark.parametrize("size", [3000, 8000, 9500], ids=str)
async def test_a_prompt_that_was_refused_waits_for_room(autojump_clock, prompt, size):
    """None of its messages, or not all, are taken at first; those that the server has are not there twice."""
    async with narrow(OF_A_KEY) as (client, clients), client.open_session() as session:
        await session.ask("hi", GREEDY)
        answers = []
        async with trio.open_nursery() as nursery:

            async def ask():
                answers.append((await session.ask(prompt, GREEDY)).text)

            async with room(clients, size):
                nursery.start_soon(ask)
                await trio.sleep(2.5)  # simulated: it asks again meanwhile
        history = [*session.history[:2], *prompt]
        assert answers == [reference(clients, history)]
        assert session.history == [*history, assistant(answers[0])]
        expected = reference(clients, [*session.history, user("next")])
        assert (await session.ask("next", GREEDY)).text == expected


@either_budget
async def test_a_prompt_that_was_refused_and_does_not_wait(autojump_clock, options, code):
    async with narrow(options) as (client, clients), client.open_session() as session:
        await session.ask("hi", GREEDY)
        history = session.history
        async with room(clients, 3000):
            with pytest.raises(EngineOverloaded) as refused:
                await session.ask("more", GREEDY, wait=False)
            assert (refused.value.code, refused.value.is_full) == (code, code == "key_buffers_full")
            assert session.history == history
        assert (await session.ask("again", GREEDY)).text == reference(clients, [*history, user("again")])


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_a_prompt_that_was_refused_may_stop_waiting(autojump_clock, how):
    async with narrow(OF_A_KEY) as (client, clients), client.open_session() as session:
        await session.ask("hi", GREEDY)
        history = session.history
        async with room(clients, 3000):
            before = trio.current_time()
            with trio.move_on_after(2.5 if how == "cancel" else 60):
                with pytest.raises(TimedOut) if how == "timeout" else nullcontext():
                    await session.ask("more", GREEDY, timeout=2.5 if how == "timeout" else None)
            assert trio.current_time() - before == pytest.approx(2.5)
            assert session.history == history
        assert (await session.ask("again", GREEDY)).text == reference(clients, [*history, user("again")])
