"""Aborting, leaving, cancelling and ending, at many moments: the turn is taken back, and the session goes on."""

import pytest
import trio
from helpers.sides import GREEDY, LONG, SHORT, assistant, user
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, SessionEnded, WorkerLost
from trioengine.core.messages import StopSession
from trioengine.core.types import Cause, FinishReason

FAILING = EngineConfig(model="toy", max_num_seqs=8, on_worker_loss="fail")


async def check_goes_on(side, session):
    """The next request of the session is answered as if the one before had not been."""
    history = session.history
    assert (await session.ask("again", GREEDY, wait=True)).text == side.answer([*history, user("again")])


def check_aborted(completion, cause=Cause.CLIENT):
    assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, cause)


async def test_leaving_early_takes_the_turn_back(autojump_clock, side, session):
    await session.ask("one", GREEDY)
    committed = session.history
    async with session.generate("two", LONG) as generation:
        async for _ in generation:
            break
    check_aborted(generation.completion)
    assert session.history == committed
    assert [type(message) for message in side.simulation.worker.received].count(StopSession) == 1
    await check_goes_on(side, session)
    assert side.engine.statistics().aborted == 1


async def test_keep_partial_keeps_the_text_that_was_received(autojump_clock, side, session):
    async with session.generate("hello", LONG, keep_partial=True) as generation:
        read = (await anext(generation)).text + (await anext(generation)).text
    text = generation.completion.text
    check_aborted(generation.completion)
    assert text.startswith(read) and len(text) < 200
    assert session.history == [user("hello"), assistant(text)]
    await check_goes_on(side, session)


async def test_an_abort_ends_the_iteration(autojump_clock, side, session):
    """It is harmless when repeated, also after the outcome."""
    async with session.generate("hello", LONG) as generation:
        await anext(generation)
        assert [generation.abort(), generation.abort()] == [True, False]
        async for _ in generation:
            pass
        completion = await generation.result()
        check_aborted(completion)
        assert side.answer([user("hello")], LONG).startswith(completion.text)
        assert not generation.abort()
    assert not generation.abort()
    assert not side.api.abort(generation.request_id)
    assert generation.completion == completion
    assert session.history == []


async def test_an_abort_after_the_finish_changes_nothing(autojump_clock, side, session):
    async with session.generate("hello", GREEDY) as generation:
        completion = await generation.result()
        assert not generation.abort()
        assert generation.completion == completion
    assert len(session.history) == 2


async def test_a_request_aborted_before_it_is_entered_is_never_asked(autojump_clock, side, session):
    generation = session.generate("never", LONG)
    assert generation.abort()
    check_aborted(generation.completion)
    assert generation.completion.text == ""
    async with generation:
        check_aborted(await generation.result())
    await check_goes_on(side, session)
    assert side.engine.statistics().finished == 1


async def test_a_request_is_aborted_by_its_id(autojump_clock, side, session):
    async with session.generate("one", LONG) as generation:
        await anext(generation)
        abort = side.api.abort
        assert [abort(99), abort(generation.request_id), abort(generation.request_id)] == [0, 1, 0]
        check_aborted(await generation.result())
    assert side.api.abort(generation.request_id) == 0


async def test_all_requests_of_a_label_are_aborted(autojump_clock, side):
    """In sessions of their own, and in an open one; requests with another label, or without one, go on."""
    completions = {}

    async def ask(number, label):
        completions[number] = await side.api.generate("x", LONG, label=label)

    async with side.api.open_session(label="mine") as session, session.generate("x", LONG, label="mine") as generation:
        await anext(generation)
        async with trio.open_nursery() as nursery:
            for number, label in enumerate(["mine", "other", None]):
                nursery.start_soon(ask, number, label)
            await wait_all_tasks_blocked()
            assert [side.api.abort(label) for label in ("unused", "mine", "mine")] == [0, 2, 0]
        check_aborted(await generation.result())
    assert {number: completions[number].cause for number in range(3)} == {0: Cause.CLIENT, 1: None, 2: None}


async def test_an_abort_by_the_operator_has_its_cause(autojump_clock, side, session):
    async with session.generate("hello", LONG) as generation:
        await anext(generation)
        side.engine.abort_all()
        check_aborted(await generation.result(), Cause.ABORT_ALL)
    await check_goes_on(side, session)


async def test_a_request_behind_another_of_its_session_is_aborted(autojump_clock, side, session):
    """It waits for the end of a request that was aborted, whose worker hangs."""
    completions = []

    async def ask():
        completions.append(await session.ask("two", LONG, label="second"))

    async with trio.open_nursery() as nursery:
        async with session.generate("one", LONG) as first:
            await anext(first)
            side.simulation.worker.hang()
            first.abort()
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert completions == []
            assert [side.api.abort("second"), side.api.abort("second")] == [1, 0]
        await side.engine.ready()
    assert [completion.cause for completion in completions] == [Cause.CLIENT]


async def test_an_exception_in_the_body_comes_out_as_it_is(autojump_clock, side):
    async with side.api.open_session() as session:
        with pytest.raises(ZeroDivisionError):
            async with session.generate("one", LONG) as generation:
                await anext(generation)
                raise ZeroDivisionError
        assert session.history == []
        await check_goes_on(side, session)
    assert side.engine.statistics().aborted == 1
    with pytest.raises(ZeroDivisionError):
        async with side.api.open_session() as session, session.generate("one", LONG):
            raise ZeroDivisionError


async def test_a_cancelled_read_loses_nothing(autojump_clock, side, session):
    async with session.generate("hello", LONG) as generation:
        texts = []
        for _ in range(5):
            with trio.move_on_after(0.001):
                texts.append((await anext(generation)).text)
        texts += [chunk.text async for chunk in generation]
    assert "".join(texts) == side.answer([user("hello")], LONG)


@pytest.mark.parametrize("simulation_options", [{}, {"thread_passes": 3, "thread_threshold": 0}], ids=["", "threads"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["ticks", "passes"])
@pytest.mark.parametrize("count", range(0, 40, 3))
async def test_cancelled_anywhere_the_turn_is_whole_or_not_there(autojump_clock, side, session, count, is_whole):
    """After some ticks, or after some passes of the scheduler: the session is as usable as before."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_after, count // 3 if is_whole else count, is_whole, scope)
            async with session.generate("hello", SHORT) as generation:
                await generation.result()
    assert session.history in ([], [user("hello"), assistant(side.answer([user("hello")], SHORT))])
    await check_goes_on(side, session)


async def cancel_after(count, is_whole, scope):
    for _ in range(count):
        await wait_all_tasks_blocked() if is_whole else await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_a_request_waits_for_the_end_of_a_cancelled_one(autojump_clock, side, session):
    with trio.CancelScope() as scope:
        async with session.generate("two", LONG) as generation:
            await anext(generation)
            scope.cancel()
            await trio.sleep_forever()
    assert session.history == []
    await check_goes_on(side, session)


async def test_a_session_that_has_ended_says_so(autojump_clock, side):
    session = side.api.open_session()
    with pytest.raises(RuntimeError, match="not entered"):
        await session.generate("hello").__aenter__()
    async with session:
        session.end()
        session.end()
        with pytest.raises(SessionEnded, match=r"the session has ended \(client\): open another one") as ended:
            await session.ask("hello")
        assert ended.value.cause == "client"
        await session.ended()
    assert session.end_cause is Cause.CLIENT
    with pytest.raises(SessionEnded):
        session.replace_history([])


@pytest.mark.parametrize("config", [FAILING], ids=[""])
async def test_the_death_of_the_worker_fails_the_request(autojump_clock, side, session):
    with pytest.raises(WorkerLost):
        async with session.generate("hello", LONG) as generation:
            await anext(generation)
            side.simulation.worker.exit(-9)
            await generation.result()
    with pytest.raises(WorkerLost):
        _ = generation.completion
    assert session.history == []
    await check_goes_on(side, session)


@pytest.mark.parametrize("config", [FAILING], ids=[""])
async def test_the_error_of_a_request_comes_after_the_rest_of_its_answer(autojump_clock, side, session):
    texts = []
    with pytest.raises(WorkerLost):
        async with session.generate("hello", LONG) as generation:
            texts.append((await anext(generation)).text)
            await trio.sleep(0.05)  # simulated: tokens come, and are not read
            side.simulation.worker.exit(-9)
            await generation.wait_settled()
            async for chunk in generation:
                texts.append(chunk.text)
    assert len(texts) == 2 and side.answer([user("hello")], LONG).startswith("".join(texts))
    await check_goes_on(side, session)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_sleep_aborts_the_answer_or_keeps_it(autojump_clock, side, session, mode):
    async with session.generate("hello", LONG) as generation:
        await anext(generation)
        await side.engine.sleep(mode=mode)
        if mode == "keep":
            await side.engine.wake()
            assert (await generation.result()).text == side.answer([user("hello")], LONG)
        else:
            check_aborted(await generation.result(), Cause.SLEEP)
    if mode == "abort":
        await side.engine.wake()
    await check_goes_on(side, session)


async def test_the_end_of_the_session_aborts_its_request(autojump_clock, side, session):
    async with session.generate("hello", LONG) as generation:
        await anext(generation)
        session.end()
        check_aborted(await generation.result())
    assert session.history == []
