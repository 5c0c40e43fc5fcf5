"""The engine, its sessions and generations on a simulated worker, under MockClock."""

import itertools

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineClosed,
    EngineConfig,
    EngineOverloaded,
    FinishReason,
    ModelError,
    RequestRejected,
    SamplingParams,
    SessionBusy,
    SessionEnded,
    WorkerLost,
)
from trioengine.core.lifecycle import Cause, Phase, Power
from trioengine.core.messages import AddMessage, AddSession, EndSession, Fatal, FatalCode, StopSession
from trioengine.testing import simulated_engine, toy_answer, toy_model
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.toy_model import IM_END

GREEDY = SamplingParams(max_tokens=40)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture
async def simulated(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        yield engine, simulation
        await everything_is_given_back(engine, simulation)


async def everything_is_given_back(engine, simulation):
    """No session, request or block is left, on either side."""
    while engine.statistics().sessions:
        await engine.gate.changed()
    await engine.check_invariants()
    statistics = engine.statistics()
    assert (statistics.preparing, statistics.waiting, statistics.running, statistics.worker_sessions) == (0, 0, 0, 0)
    assert statistics.received == statistics.finished + statistics.aborted + statistics.failed
    orders_are_kept(simulation)


def orders_are_kept(simulation):
    """Per attachment: ADD_SESSION (ADD_MESSAGE STOP_SESSION?)* END_SESSION, on every incarnation."""
    for worker in simulation.workers:
        lives = {}
        for message in worker.received:
            if isinstance(message, (AddSession, AddMessage, StopSession, EndSession)):
                lives.setdefault(message.session, []).append(type(message))
        for life in lives.values():
            assert life[0] is AddSession
            assert life.count(AddSession) == 1
            assert life.count(EndSession) <= 1
            assert EndSession not in life[:-1]
            for previous, following in itertools.pairwise(life):
                assert following is not StopSession or previous is AddMessage


def reference(engine, prompt, params=GREEDY):
    ids = prompt if isinstance(prompt, list) else engine.tokenizer.apply_chat_template(chat(prompt))
    return toy_answer(ids, params.max_tokens, ignore_eos=params.ignore_eos)


def chat(prompt):
    return [{"role": "user", "content": prompt}]


async def test_an_answer_is_the_models(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session(label="mine") as session, session.generate("hello", GREEDY) as generation:
        chunks = [chunk async for chunk in generation]
        completion = generation.completion
    expected = reference(engine, "hello")
    assert list(completion.token_ids) == expected
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == completion.text == engine.tokenizer.decode(expected)
    assert completion.usage.completion_tokens == len(expected)
    assert completion.finish_reason is (FinishReason.STOP if expected[-1] == IM_END else FinishReason.LENGTH)
    assert session.history == [*chat("hello"), {"role": "assistant", "content": completion.text}]
    assert "mine" in repr(session)
    assert "toy" in repr(engine)


async def test_a_slow_reader_gets_one_merged_chunk(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate([1, 2, 3], LONG) as generation:
        await generation.settled.wait()
        chunks = [chunk async for chunk in generation]
    assert [list(chunk.token_ids) for chunk in chunks] == [reference(engine, [1, 2, 3], LONG)]
    assert "length" in repr(generation)


async def test_one_shot(autojump_clock, simulated):
    engine, _ = simulated
    completion = await engine.generate("hello", GREEDY)
    assert list(completion.token_ids) == reference(engine, "hello")


async def test_many_at_once_and_each_its_own_text(autojump_clock, simulated):
    engine, _ = simulated
    answers = {}

    async def ask(prompt):
        answers[prompt] = await engine.generate(prompt, GREEDY, wait=True)

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(ask, f"question {number}")
    assert {p: list(a.token_ids) for p, a in answers.items()} == {p: reference(engine, p) for p in answers}
    assert len(answers) == 30


async def test_turns_are_one_rendering_and_the_earlier_ones_are_cached(autojump_clock, simulated):
    engine, simulation = simulated
    block = simulation.limits.block_size
    messages = []
    async with engine.open_session() as session:
        held = 0
        for turn in range(4):
            async with session.generate(f"turn {turn}", GREEDY) as generation:
                completion = await generation.result()
            messages += chat(f"turn {turn}")
            prompt = engine.tokenizer.apply_chat_template(messages)
            assert list(completion.token_ids) == toy_answer(prompt, 40)
            assert completion.usage.prompt_tokens == len(prompt)
            assert completion.usage.cached_tokens >= held // block * block
            held = len(prompt) + len(completion.token_ids) - 1
            messages.append({"role": "assistant", "content": completion.text})
        assert session.history == messages


async def test_a_turn_cut_by_length_is_closed_by_the_template(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", SamplingParams(max_tokens=5, ignore_eos=True)) as generation:
            first = await generation.result()
        async with session.generate("two", GREEDY) as generation:
            second = await generation.result()
    assert first.finish_reason is FinishReason.LENGTH
    messages = [*chat("one"), {"role": "assistant", "content": first.text}, *chat("two")]
    prompt = engine.tokenizer.render(messages).replace(first.text, "\0")  # the answer's own ids are kept
    head, tail = prompt.split("\0")
    encode = engine.tokenizer.encode
    assert list(second.token_ids) == toy_answer([*encode(head), *first.token_ids, *encode(tail)], 40)


async def test_a_stop_string_ends_the_answer_before_it(autojump_clock, simulated):
    engine, _ = simulated
    whole = engine.tokenizer.decode(reference(engine, [7, 7], LONG))
    stop = whole[20:23]
    async with engine.open_session() as session:
        params = SamplingParams(max_tokens=200, ignore_eos=True, stop=stop)
        async with session.generate([7, 7], params) as generation:
            chunks = [chunk async for chunk in generation]
            completion = generation.completion
        assert completion.finish_reason is FinishReason.STOP
        assert completion.text == whole[: whole.index(stop)] == "".join(chunk.text for chunk in chunks)
        assert engine.tokenizer.decode(completion.token_ids) == completion.text + stop
        assert session.phase is Phase.IDLE
    assert engine.statistics().finished == 1


async def test_logprobs_and_seeds_reach_the_worker(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.generate([1], SamplingParams(max_tokens=1, seed=5))
    await engine.generate([1], SamplingParams(max_tokens=None))
    first, second = [message for message in simulation.worker.received if isinstance(message, AddMessage)]
    assert first.params.seed == 5
    assert second.params.seed is not None
    assert second.params.max_tokens == simulation.limits.max_model_len - 1


@pytest.mark.parametrize("passes", range(12))
async def test_cancelled_after_some_passes(autojump_clock, passes):
    """The caller is cancelled at any point of entering, streaming and leaving: everything is given back, and the turn
    is either there as a whole or not at all."""
    async with simulated_engine(thread_passes=3) as (engine, simulation):
        async with engine.open_session() as session:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(use_session, session, "x" * 30)
                    for _ in range(passes):
                        await wait_all_tasks_blocked() if passes % 2 else await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert session.history in ([], session.history[:2])
            async with session.generate("again", GREEDY) as generation:
                await generation.result()
            assert session.history[-2] == chat("again")[0]
        await everything_is_given_back(engine, simulation)


async def use_session(session, prompt):
    async with session.generate(prompt, LONG) as generation:
        async for _ in generation:
            pass


async def test_leaving_early_takes_the_turn_back_and_waits(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            await generation.result()
        committed = session.history
        async with session.generate("two", LONG) as generation:
            async for _ in generation:
                break
        assert generation.settled.is_set()
        assert generation.completion.cause is Cause.CLIENT
        assert session.history == committed
        stops = [message for message in simulation.worker.received if isinstance(message, StopSession)]
        assert len(stops) == 1
        async with session.generate("three", GREEDY) as generation:
            third = await generation.result()
        prompt = engine.tokenizer.apply_chat_template([*committed, *chat("three")])
        assert list(third.token_ids) == toy_answer(prompt, 40)


async def test_keep_partial_keeps_what_was_read(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG, keep_partial=True) as generation:
            text = (await anext(generation)).text + (await anext(generation)).text
        assert session.history[-1]["content"].startswith(text)
        assert generation.completion.finish_reason is FinishReason.ABORT
        async with session.generate("two", GREEDY) as generation:
            await generation.result()


async def test_abort_twice_and_after_the_end(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            generation.abort()
            generation.abort()
            completion = await generation.result()
            assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.CLIENT)
            generation.abort()
        generation.abort()
        assert not engine.abort(generation.request_id)
        session.end()
        session.end()
        with pytest.raises(SessionEnded) as caught:
            async with session.generate("two"):
                pass
        assert caught.value.cause == "client"
        await session.ended()


async def test_abort_never_downgrades_a_finish_on_its_way(autojump_clock, simulated):
    """The worker's last row is in the pipe when abort() is called: the answer is finished, not aborted."""
    engine, simulation = simulated
    expected = reference(engine, [5], LONG)
    async with engine.open_session() as session, session.generate([5], LONG) as generation:
        async for _ in generation:
            if len(simulation.worker.step_loop.held_tokens(session.id)) == 1 + len(expected):
                generation.abort()
        assert generation.completion.finish_reason is FinishReason.LENGTH
        assert list(generation.completion.token_ids) == expected
    assert engine.statistics().aborted == 0


async def test_an_exception_in_the_body_comes_out_as_it_is(autojump_clock, simulated):
    engine, _ = simulated
    with pytest.raises(ZeroDivisionError):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await anext(generation)
            raise ZeroDivisionError
    assert engine.statistics().aborted == 1


async def test_two_tasks_on_one_session(autojump_clock, simulated):
    """The second is refused and disturbs nothing; while the first is stopping, it waits."""
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            for prompt in ("two", "three"):
                with pytest.raises(SessionBusy):
                    async with session.generate(prompt):
                        pass
            with pytest.raises(SessionBusy):
                session.replace_history([])
            first = await generation.result()
        assert list(first.token_ids) == reference(engine, "one")
        with trio.CancelScope() as scope:
            async with session.generate("two", LONG) as generation:
                await anext(generation)
                scope.cancel()
                await trio.sleep_forever()
        assert session.phase is Phase.STOPPING
        async with session.generate("three", GREEDY) as generation:
            await generation.result()
    assert engine.statistics().rejected == 2


async def test_a_timeout_is_an_abort(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG, timeout=0.1) as generation:
            completion = await generation.result()
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)
        assert 0 < len(completion.token_ids) < 20
        assert session.history == []
        async with session.generate("one", GREEDY, timeout=100) as generation:
            assert (await generation.result()).finish_reason is not FinishReason.ABORT
        with pytest.raises(RequestRejected, match="timeout"):
            session.generate("one", timeout=-1)


async def test_abort_all_and_by_id(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as first, engine.open_session() as second:
        async with first.generate("one", LONG) as one, second.generate("two", LONG) as two:
            await anext(one)
            assert engine.abort(one.request_id)
            assert (await one.result()).cause is Cause.CLIENT
            engine.abort_all()
            assert (await two.result()).cause is Cause.ABORT_ALL
        assert engine.statistics().sessions == 2


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        (3, "invalid_value"),
        ([1, -1], "invalid_value"),
        ([1, 259], "invalid_value"),
        ([{"role": "king", "content": "x"}], "invalid_value"),
        ([{"role": "user", "content": 3}], "invalid_value"),
        ([{"role": "user", "content": "x"}, 3], "invalid_value"),
        ("x" * 600, "context_length_exceeded"),
        ("x" * 100_000, "context_length_exceeded"),
        ([{"role": "user", "content": "x" * 100_000}], "context_length_exceeded"),
        ([1] * 512, "context_length_exceeded"),
    ],
)
async def test_a_bad_prompt_is_refused_alone(autojump_clock, simulated, prompt, code):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(RequestRejected) as caught:
            async with session.generate(prompt, GREEDY):
                pass
        assert caught.value.code == code
        assert session.history == []
        async with session.generate([1], GREEDY) as generation:
            await generation.result()


async def test_token_ids_beyond_the_vocabulary_in_parameters(autojump_clock, simulated):
    engine, _ = simulated
    for params in (SamplingParams(stop_token_ids=(259,)), SamplingParams(logit_bias={300: 1.0})):
        with pytest.raises(RequestRejected, match="vocabulary of 259"):
            await engine.generate("x", params)


async def test_one_request_fails_alone(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            simulation.worker.runner.fail_requests.add(generation.request_id)
            with pytest.raises(RequestRejected, match="told to fail"):
                await generation.result()
            with pytest.raises(RequestRejected, match="told to fail"):
                _ = generation.completion
        assert session.history == []
        async with session.generate("two", GREEDY) as generation:
            await generation.result()
    assert engine.statistics().failed == 1


async def test_sessions_have_a_limit(autojump_clock):
    config = EngineConfig(model="toy", max_sessions=2)
    async with simulated_engine(config) as (engine, _), engine.open_session(), engine.open_session() as second:
        with pytest.raises(EngineOverloaded) as caught:
            async with engine.open_session():
                pass
        assert caught.value.code == "sessions"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_later, second)
            async with engine.open_session(wait=True):
                nursery.cancel_scope.cancel()


async def end_later(session):
    await trio.sleep(1)
    session.end()


async def test_requests_have_a_limit(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=1, max_num_batched_tokens=64)
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, "one", LONG)
        nursery.start_soon(engine.generate, "two", LONG)
        await wait_all_tasks_blocked()
        with pytest.raises(EngineOverloaded) as caught:
            await engine.generate("three", GREEDY)
        assert caught.value.code == "queue"
        with pytest.raises(EngineOverloaded):
            await engine.generate("three", GREEDY, wait=True, timeout=0.5)
        completion = await engine.generate("three", GREEDY, wait=True)
        assert list(completion.token_ids) == reference(engine, "three")


async def test_drain_lets_requests_finish_and_admits_none(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", GREEDY) as generation:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.drain)
            await wait_all_tasks_blocked()
            with pytest.raises(EngineClosed):
                await engine.generate("two")
            with pytest.raises(EngineClosed):
                async with engine.open_session():
                    pass
        assert generation.outcome.finish_reason is not FinishReason.ABORT
    assert engine.statistics().power is Power.DRAINING


async def test_drain_aborts_after_its_timeout(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        assert not await engine.drain(timeout=0.5)
        assert generation.completion.cause is Cause.SHUTDOWN


async def test_closing_the_engine_ends_everything(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        session = engine.open_session()
        await session.__aenter__()
        generation = session.generate("one", LONG)
        await generation.__aenter__()
        await anext(generation)
    assert generation.completion.cause is Cause.SHUTDOWN
    assert session.end_cause is Cause.SHUTDOWN
    assert simulation.worker.reaped
    assert any(isinstance(message, EndSession) for message in simulation.worker.received)
    assert engine.statistics().sessions == 0
    with pytest.raises(EngineClosed):
        await engine.generate("two")
    orders_are_kept(simulation)


async def test_cancelling_the_engine_still_writes_the_ends(autojump_clock):
    with trio.CancelScope() as scope:
        async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(engine.generate, "one", LONG)
            await wait_all_tasks_blocked()
            scope.cancel()
            await trio.sleep_forever()
    assert sum(isinstance(message, EndSession) for message in simulation.worker.received) == 3
    assert simulation.worker.reaped


async def test_the_worker_dies_and_everyone_is_told(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        async with engine.open_session() as session:
            async with session.generate("one", GREEDY) as generation:
                first = await generation.result()
            async with session.generate("two", LONG) as generation:
                await anext(generation)
                died = trio.current_time()
                simulation.worker.kill()
                with pytest.raises(WorkerLost) as caught:
                    await generation.result()
                assert trio.current_time() - died < 1
                assert caught.value.exit_code == -9
            assert [turn["content"] for turn in session.history] == ["one", first.text]
            with pytest.raises(EngineOverloaded, match="restarting") as caught:
                async with session.generate("three"):
                    pass
            assert caught.value.code == "restarting"
            async with session.generate("three", GREEDY, wait=True) as generation:
                third = await generation.result()
            prompt = engine.tokenizer.apply_chat_template([*session.history[:2], *chat("three")])
            assert list(third.token_ids) == toy_answer(prompt, 40)
        assert engine.statistics().incarnation == 2
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("fault", ["hang", "stall"])
async def test_a_worker_that_hangs_is_replaced(autojump_clock, fault):
    config = EngineConfig(model="toy", step_timeout=20)
    async with simulated_engine(config) as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await anext(generation)
            began = trio.current_time()
            getattr(simulation.worker, fault)()
            with pytest.raises(WorkerLost, match="no answer" if fault == "hang" else "one step"):
                await generation.result()
            bound = config.unresponsive_timeout if fault == "hang" else config.step_timeout
            assert trio.current_time() - began <= bound + config.ping_interval + 1
        await engine.generate("two", GREEDY, wait=True)
        await everything_is_given_back(engine, simulation)


async def test_a_worker_that_speaks_nonsense_is_replaced(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            simulation.worker.say(b"\xff" * 100)
            with pytest.raises(WorkerLost, match="protocol"):
                await generation.result()
        await engine.generate("two", GREEDY, wait=True)


async def test_a_request_is_aborted_while_its_worker_dies(autojump_clock):
    """Death in STOPPING is the abort's outcome."""
    async with simulated_engine() as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await anext(generation)
            generation.abort()
            simulation.worker.kill()
            assert (await generation.result()).cause is Cause.CLIENT
        assert (engine.statistics().aborted, engine.statistics().failed) == (1, 0)


async def test_a_worker_that_cannot_start_gives_the_reason(autojump_clock):
    fatal = Fatal(FatalCode.MODEL, "x.gguf: architecture 'gpt5' is not supported", "Traceback")
    with pytest.raises(ModelError, match="gpt5"):
        async with simulated_engine(behaviours=[Behaviour(fatal=fatal)]):
            raise AssertionError("it never was ready")
    fatal = Fatal(FatalCode.MEMORY, "not enough memory", "Traceback of it")
    with pytest.raises(WorkerLost, match="not enough memory") as caught:
        async with simulated_engine(behaviours=[Behaviour(fatal=fatal)]):
            raise AssertionError("it never was ready")
    assert caught.value.traceback == "Traceback of it"


async def test_a_worker_that_makes_no_progress_while_loading(autojump_clock):
    config = EngineConfig(model="toy", startup_timeout=30)
    with pytest.raises(WorkerLost, match="no progress"):
        async with simulated_engine(config, behaviours=[Behaviour(load_time=1e6)]):
            raise AssertionError("it never was ready")


async def test_ten_deaths_without_a_finished_request(autojump_clock):
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    with pytest.raises(WorkerLost, match="10 times"):
        async with simulated_engine(behaviours=[Behaviour(), dying]) as (_, simulation):
            simulation.worker.kill()
            await trio.sleep_forever()
    assert len(simulation.workers) == 10


async def test_waiting_for_the_restart_has_a_limit(autojump_clock):
    async with simulated_engine(behaviours=[Behaviour(), Behaviour(load_time=50)]) as (engine, simulation):
        simulation.worker.kill()
        while engine.statistics().power is Power.AWAKE:
            await engine.gate.changed()
        with pytest.raises(EngineOverloaded, match="restarting"):
            await engine.generate("x", wait=True, timeout=5)
        with pytest.raises(EngineOverloaded, match="no worker"):
            await engine.check_invariants()


async def test_an_audit_does_not_outlive_its_worker(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:

        async def audit():
            with pytest.raises(WorkerLost):
                await engine.check_invariants()

        simulation.worker.stall()
        nursery.start_soon(audit)
        await wait_all_tasks_blocked()
        simulation.worker.kill()


async def test_a_crash_in_one_session_ends_it_alone(autojump_clock, simulated, caplog):
    engine, _ = simulated
    async with engine.open_session() as broken, engine.open_session() as whole:
        async with broken.generate("one", LONG) as one, whole.generate("two", GREEDY) as two:
            one.answer = None  # a bug: the next row cannot be taken in
            with pytest.raises(Exception, match="the session crashed"):
                await one.result()
            assert list((await two.result()).token_ids) == reference(engine, "two")
        assert broken.end_cause is Cause.ERROR
    assert "crashed" in caplog.text


async def test_the_same_things_are_not_entered_twice(autojump_clock, simulated):
    engine, _ = simulated
    session = engine.open_session()
    with pytest.raises(RuntimeError, match="not entered"):
        _ = session.history
    async with session:
        with pytest.raises(RuntimeError, match="once"):
            await session.__aenter__()
        generation = session.generate("x", GREEDY)
        with pytest.raises(RuntimeError, match="not entered"):
            _ = generation.request_id
        async with generation:
            with pytest.raises(RuntimeError, match="once"):
                await generation.__aenter__()
            with pytest.raises(RuntimeError, match="no outcome"):
                _ = generation.completion
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generation.result)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await generation.result()


async def test_history_can_be_given_and_replaced(autojump_clock, simulated):
    engine, _ = simulated
    history = [{"role": "system", "content": "be brief"}, *chat("hi"), {"role": "assistant", "content": "yo"}]
    async with engine.open_session(history=history) as session:
        assert session.history == history
        async with session.generate("now", GREEDY) as generation:
            completion = await generation.result()
        prompt = engine.tokenizer.apply_chat_template([*history, *chat("now")])
        assert list(completion.token_ids) == toy_answer(prompt, 40)
        session.replace_history(chat("other"))
        assert session.history == chat("other")
    with pytest.raises(RequestRejected, match=r"history\[0\]"):
        async with engine.open_session(history=[{"role": "x"}]):
            pass


async def test_raw_sessions_and_chats_do_not_mix(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True)) as generation:
            first = await generation.result()
        with pytest.raises(RequestRejected, match="raw token ids"):
            async with session.generate("chat"):
                pass
        async with session.generate([3], GREEDY) as generation:
            second = await generation.result()
        assert list(second.token_ids) == toy_answer([1, 2, *first.token_ids, 3], 40)


async def test_two_hundred_rounds_of_everything_that_goes_wrong(autojump_clock):
    """Cancels, closes, aborts, exceptions, second users, at many moments, under load: nothing is left."""
    async with simulated_engine() as (engine, simulation):
        before = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for round_number in range(200):
                nursery.start_soon(go_wrong, engine, round_number)
        await everything_is_given_back(engine, simulation)
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before
        statistics = engine.statistics()
        assert statistics.received >= 200
        assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


async def go_wrong(engine, round_number):
    await trio.sleep(round_number % 10 * 0.013)
    with trio.move_on_after(0.001 + round_number % 7 * 0.1):
        try:
            async with engine.open_session(wait=True) as session:
                async with session.generate(f"round {round_number}", LONG, wait=True) as generation:
                    async for _ in generation:
                        match round_number % 5:
                            case 0:
                                generation.abort()
                                generation.abort()
                            case 1:
                                raise ZeroDivisionError
                            case 2:
                                session.end()
                                session.end()
                            case 3:
                                with pytest.raises(SessionBusy):
                                    await session.generate("x").__aenter__()
        except ZeroDivisionError:
            pass


def test_the_toy_model_knows_its_end():
    assert toy_model().eos_token_ids[0] == IM_END


async def test_the_engine_dies_for_good_while_others_knock(autojump_clock):
    """Whoever opens a session in any pass of the engine's end is refused with a typed error; one error comes out."""
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    refusals = []

    async def knock(engine):
        while not refusals or not isinstance(refusals[-1], EngineClosed):
            try:
                async with engine.open_session() as session, session.generate("x", LONG) as generation:
                    await trio.lowlevel.checkpoint()
                    generation.abort()
            except (EngineOverloaded, EngineClosed, WorkerLost) as exc:
                refusals.append(exc)
                await trio.sleep(0.05)

    async with trio.open_nursery() as outside:
        with pytest.raises(WorkerLost, match="10 times"):
            async with simulated_engine(behaviours=[Behaviour(), dying]) as (engine, simulation):
                for _ in range(3):
                    outside.start_soon(knock, engine)
                simulation.worker.kill()
                await trio.sleep_forever()


async def test_a_body_that_fails_with_the_engine_gives_one_error(autojump_clock):
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    with pytest.raises(WorkerLost, match="2 times"):
        async with simulated_engine(
            EngineConfig(model="toy", max_restarts=2, restart_delays=(0.0,)), behaviours=[Behaviour(), dying]
        ) as (engine, simulation):
            simulation.worker.kill()
            while True:
                await engine.gate.changed()
                if engine.gate.failure is not None:
                    raise WorkerLost("mine")
