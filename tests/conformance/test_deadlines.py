"""A timeout raises TimedOut at the deadline, with the text received so far, whatever the worker does."""

import pytest
import trio
from helpers.sides import GREEDY, LONG, assistant, user

from trioengine import EngineConfig, EngineOverloaded, SessionBusy, SessionEnded, TimedOut
from trioengine.core.types import Cause, FinishReason

ONE_SLOT = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64)
SLOTS = "all 1 request slots are taken (max_num_seqs 1 + max_num_queued_reqs 0)"
one_slot = pytest.mark.parametrize("config", [ONE_SLOT], ids=[""])
either_part = pytest.mark.parametrize("keep_partial", [False, True])


def check_timed_out(completion):
    assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)


def check_empty(error):
    """The request got no token."""
    check_timed_out(error.completion)
    completion = error.completion
    assert (completion.text, completion.token_ids, completion.usage.completion_tokens) == ("", (), 0)


async def replace_worker(side):
    """Wait for the successor of a worker that hangs."""
    assert (await side.api.generate("last", GREEDY, wait=True)).text


async def test_a_running_request_is_aborted_at_its_deadline(autojump_clock, side, session):
    """Its chunks come first; the turn is taken back."""
    generation, texts = session.generate("one", LONG, timeout=0.1), []
    with pytest.raises(TimedOut) as caught:
        async with generation:
            async for chunk in generation:
                texts.append(chunk.text)
    assert caught.value.completion == generation.completion
    assert generation.completion.text == "".join(texts) != ""
    check_timed_out(generation.completion)
    assert session.history == []
    with pytest.raises(TimedOut) as again:
        await generation.result()
    assert again.value is not caught.value
    assert (await session.ask("one", GREEDY, timeout=100)).cause is None


async def test_the_text_of_a_timed_out_request_can_be_kept(autojump_clock, session):
    with pytest.raises(TimedOut) as caught:
        await session.ask("one", LONG, timeout=0.1, keep_partial=True)
    assert session.history == [user("one"), assistant(caught.value.completion.text)]


async def test_a_one_shot_call_has_its_text(autojump_clock, side):
    with pytest.raises(TimedOut) as caught:
        await side.api.generate("one", LONG, timeout=0.1)
    assert caught.value.completion.text


@either_part
async def test_a_hung_worker_does_not_delay_the_timeout(autojump_clock, side, session, keep_partial):
    before = trio.current_time()
    with pytest.raises(TimedOut) as caught:
        async with session.generate("one", LONG, timeout=2, keep_partial=keep_partial) as generation:
            await anext(generation)
            side.simulation.worker.hang()
            await generation.result()
    assert trio.current_time() == before + 2
    if side.name == "engine":
        statistics = side.engine.statistics()
        assert (statistics.running, statistics.aborted) == (1, 0)  # its slot waits for the worker
    text = caught.value.completion.text
    assert text == generation.completion.text != ""
    history = [user("one"), assistant(text)] if keep_partial else []
    assert session.history == history
    assert (await session.ask("again", GREEDY, wait=True)).text == side.answer([*history, user("again")])
    assert caught.value.completion == generation.completion
    statistics = side.engine.statistics()
    assert (statistics.received, statistics.finished, statistics.aborted) == (2, 1, 1)
    assert statistics.abort_causes[Cause.TIMEOUT if side.name == "engine" else Cause.CLIENT] == 1


async def test_a_hung_worker_does_not_delay_the_timeout_of_a_call(autojump_clock, side):
    side.simulation.worker.hang()
    before = trio.current_time()
    with pytest.raises(TimedOut) as caught:
        await side.api.generate("one", LONG, timeout=2)
    assert trio.current_time() == before + 2
    check_empty(caught.value)
    assert (await side.api.generate("again", GREEDY, wait=True)).text == side.answer([user("again")])


async def test_the_next_request_waits_for_the_worker_within_its_own_timeout(autojump_clock, side, session):
    side.simulation.worker.hang()
    for timeout in (2, 3):
        before = trio.current_time()
        with pytest.raises(TimedOut) as caught:
            await session.ask("one", LONG, timeout=timeout)
        assert trio.current_time() == before + timeout
        check_empty(caught.value)
    assert (await session.ask("again", GREEDY, wait=True)).text == side.answer([user("again")])


async def test_leaving_waits_for_the_worker_until_the_deadline(autojump_clock, side, session):
    before = trio.current_time()
    async with session.generate("one", LONG, timeout=2) as generation:
        await anext(generation)
        side.simulation.worker.hang()
    assert trio.current_time() == before + 2
    assert generation.completion.cause is Cause.CLIENT
    await replace_worker(side)


async def test_the_deadline_of_an_aborted_request_decides_by_the_first_cause(autojump_clock, side, session):
    before = trio.current_time()
    async with session.generate("one", LONG, timeout=2) as generation:
        side.simulation.worker.hang()
        generation.abort()
        assert (await generation.result()).cause is Cause.CLIENT
    assert trio.current_time() == before + 2
    await replace_worker(side)


@either_part
async def test_a_history_is_replaced_right_after_a_timeout(autojump_clock, side, session, keep_partial):
    with pytest.raises(TimedOut):
        async with session.generate("one", LONG, timeout=2, keep_partial=keep_partial) as generation:
            await anext(generation)
            side.simulation.worker.hang()
            with pytest.raises(SessionBusy):
                session.replace_history([])
            await generation.result()
    session.replace_history([user("other"), assistant("yes")])
    for question in ("again", "and again"):
        expected = side.answer([*session.history, user(question)])
        assert (await session.ask(question, GREEDY, wait=True)).text == expected


async def test_a_session_that_ends_after_a_timeout_has_ended(autojump_clock, side):
    async with side.api.open_session() as session:
        side.simulation.worker.hang()
        with pytest.raises(TimedOut):
            await session.ask("one", LONG, timeout=2)
    with pytest.raises(SessionEnded, match=r"the session has ended \(.*\): open another one"):
        session.replace_history([])
    with pytest.raises(SessionEnded):
        await session.ask("two", GREEDY)
    await replace_worker(side)


@one_slot
async def test_the_wait_for_a_slot_is_part_of_the_timeout(autojump_clock, side, session):
    async with session.generate("one", LONG):
        for wait in (None, True):
            before = trio.current_time()
            with pytest.raises(TimedOut) as caught:
                await side.api.generate("two", GREEDY, timeout=0.2, wait=wait)
            assert trio.current_time() == pytest.approx(before + 0.2)
            check_empty(caught.value)
            assert str(caught.value) == f"timed out after 0.2 s while waiting: {SLOTS}"
            assert isinstance(caught.value.__cause__, EngineOverloaded)


@one_slot
async def test_a_timeout_while_waiting_takes_the_request_back(autojump_clock, side, session):
    async with side.api.open_session() as other:
        async with session.generate("one", LONG):
            generation = other.generate("two", GREEDY, timeout=0.1)
            with pytest.raises(TimedOut):
                async with generation:
                    raise AssertionError("it was not admitted")
            assert generation.completion.cause is Cause.TIMEOUT
            assert other.history == []
        assert (await other.ask("again", GREEDY)).text == side.answer([user("again")])


async def test_a_timeout_names_its_seconds_and_the_progress(autojump_clock, side, session):
    with pytest.raises(TimedOut) as caught:
        await session.ask("one", LONG, timeout=0.25)
    came = f"{len(caught.value.completion.text)} characters of the answer"
    assert str(caught.value) == f"timed out after 0.25 s with {came}, which .completion holds"
    side.simulation.worker.hang()
    with pytest.raises(TimedOut) as caught:
        await session.ask("one", LONG, timeout=2.5)
    assert str(caught.value) == "timed out after 2.5 s before any text"
    await replace_worker(side)
