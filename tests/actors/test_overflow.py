"""A chat that outgrows the context: it is refused, or its oldest turns are dropped."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from helpers.expectations import said

from trioengine import RequestRejected, SamplingFailed, SamplingParams
from trioengine.core.messages import AddMessage
from trioengine.testing import toy_answer

SHORT = SamplingParams(max_tokens=20)  # an end token that is ignored would be in the prompt, and not in the history
SYSTEM = {"role": "system", "content": "be brief"}
CONTEXT = 512


def user(text):
    return {"role": "user", "content": text}


def question(number):
    return f"question {number}, which is rather long, so that only a few of its kind fit in the context"


def answer(engine, messages, params=SHORT):
    ids = toy_answer(engine.tokenizer.apply_chat_template(messages), params.max_tokens, ignore_eos=params.ignore_eos)
    return {"role": "assistant", "content": engine.tokenizer.decode(ids)}


def shortened(engine, messages, room):
    """The messages, of which the first is the system's, without the fewest oldest turns; and their number."""
    for count in range(len(messages)):
        kept = [messages[0], *messages[1 + 2 * count :]]
        if len(engine.tokenizer.apply_chat_template(kept)) <= CONTEXT - room:
            return kept, count
    raise AssertionError("even the newest message does not fit")


async def ask(session, prompt, params=SHORT, **options):
    async with session.generate(prompt, params, **options) as generation:
        return await generation.result()


def dropping(engine, history=(SYSTEM,)):
    return engine.open_session(overflow="drop_oldest_turns", history=history)


async def test_by_default_it_is_refused(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(RequestRejected) as refused:
            for number in range(20):
                completion = await ask(session, question(number))
                assert completion.dropped_turns == 0
        history = session.history
        assert refused.value.code == "context_length_exceeded"
        assert len(history) == 2 * number > 4
        with pytest.raises(RequestRejected):
            await ask(session, question(number))
        assert session.history == history


async def test_the_oldest_turns_are_dropped_and_leave_the_history(autojump_clock, simulated):
    """Every prompt is the longest that leaves room for its answer; the worker is sent the part that it lacks."""
    engine, simulation = simulated
    total = 0
    async with dropping(engine) as session:
        for number in range(12):
            messages, count = shortened(engine, [*session.history, user(question(number))], SHORT.max_tokens)
            completion = await ask(session, question(number))
            assert completion.dropped_turns == count
            assert completion.usage.prompt_tokens == len(engine.tokenizer.apply_chat_template(messages))
            assert session.history == [*messages, answer(engine, messages)]
            total += count
        assert session.history[0] == SYSTEM
        assert total == 12 - (len(session.history) - 1) // 2 > 4
    system = len(engine.tokenizer.apply_chat_template([SYSTEM], add_generation_prompt=False))
    bases = [message.base for message in said(simulation, AddMessage)]
    assert bases[0] == 0 and min(bases[1:]) >= system  # the prefix that is left is used again


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 128), (100, 100), (400, 256)])
async def test_there_is_room_for_the_answer(autojump_clock, simulated, max_tokens, room):
    engine, _ = simulated
    params = replace(SHORT, max_tokens=max_tokens)
    async with dropping(engine) as session:
        for number in range(6):
            _, count = shortened(engine, [*session.history, user(question(number))], room)
            completion = await ask(session, question(number), params)
            assert completion.dropped_turns == count
            assert completion.usage.prompt_tokens <= CONTEXT - room


async def test_the_newest_turn_is_never_dropped(autojump_clock, simulated):
    """It is answered while it leaves room for a token, and refused beyond that; then the history is as it was."""
    engine, _ = simulated
    async with dropping(engine) as session:
        for number in range(2):
            await ask(session, question(number))
        history = session.history
        for text in ("x" * 600, "x" * 10_000, [user("old"), user("x" * 600)]):
            with pytest.raises(RequestRejected) as refused:
                await ask(session, text)
            assert refused.value.code == "context_length_exceeded"
            assert session.history == history
        overhead = len(engine.tokenizer.apply_chat_template([SYSTEM, user("")]))
        completion = await ask(session, "x" * (CONTEXT - overhead - 1), replace(SHORT, ignore_eos=True))
        assert (completion.dropped_turns, completion.usage.completion_tokens) == (2, 1)


async def test_the_oldest_turns_of_a_prompt_are_dropped_too(autojump_clock, simulated):
    engine, _ = simulated
    messages = [SYSTEM]
    for number in range(20):
        messages += [user(question(number)), {"role": "assistant", "content": "yes"}]
    async with dropping(engine, history=None) as session:
        kept, count = shortened(engine, [*messages, user("now?")], SHORT.max_tokens)
        completion = await ask(session, [*messages, user("now?")])
        assert completion.dropped_turns == count > 10
        assert session.history == [*kept, answer(engine, kept)]


@pytest.mark.parametrize("how", ["aborted", "left", "failed", "rejected"])
async def test_an_answer_that_is_not_committed_leaves_the_history_as_it_was(autojump_clock, simulated, how):
    engine, simulation = simulated
    async with dropping(engine) as session:
        for number in range(4):
            await ask(session, question(number))
        before = session.history
        params = replace(SHORT, stop_token_ids=(99999,)) if how == "rejected" else SHORT
        error = {"failed": SamplingFailed, "rejected": RequestRejected}.get(how)
        with nullcontext() if error is None else pytest.raises(error):
            async with session.generate(question(5), params) as generation:
                if how == "failed":
                    simulation.worker.runner.fail_requests.add(generation.request_id)
                    await generation.result()
                if how == "aborted":
                    generation.abort()
                    completion = await generation.result()
                    assert completion.dropped_turns > 0
        assert session.history == before
        kept, count = shortened(engine, [*before, user(question(5))], SHORT.max_tokens)
        assert (await ask(session, question(5))).dropped_turns == count > 0
        assert session.history == [*kept, answer(engine, kept)]


@pytest.mark.parametrize("loss", ["sleep", "death"])
async def test_a_suspended_request_goes_on_without_the_dropped_turns(autojump_clock, simulated, loss):
    engine, simulation = simulated
    async with dropping(engine) as session:
        for number in range(4):
            await ask(session, question(number))
        kept, count = shortened(engine, [*session.history, user(question(5))], SHORT.max_tokens)
        async with session.generate(question(5), SHORT) as generation:
            await anext(generation)
            if loss == "sleep":
                await engine.sleep(mode="keep")
                await engine.wake()
            else:
                simulation.worker.kill()
            completion = await generation.result()
        assert completion.dropped_turns == count > 0
        assert session.history == [*kept, answer(engine, kept)]


async def test_token_ids_are_refused(autojump_clock, simulated):
    engine, _ = simulated
    async with dropping(engine, history=None) as session:
        await ask(session, [1] * 400)
        with pytest.raises(RequestRejected, match="leave no room"):
            await ask(session, [1] * 100)


async def test_an_unknown_policy_is_refused(autojump_clock, simulated):
    engine, _ = simulated
    with pytest.raises(RequestRejected, match="overflow must be"):
        engine.open_session(overflow="drop")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("drop",), "overflow"), (("refuse", -0.1), "retention_ratio"), (("refuse", "x"), "retention_ratio")],
)
async def test_a_policy_that_is_refused_changes_nothing(autojump_clock, simulated, arguments, param):
    engine, _ = simulated
    async with engine.open_session() as session:
        session.set_overflow("drop_oldest_turns", 0.5)
        with pytest.raises(RequestRejected) as caught:
            session.set_overflow(*arguments)
        assert caught.value.param == param
        assert (session._state.overflow, session._state.retention_ratio) == ("drop_oldest_turns", 0.5)
