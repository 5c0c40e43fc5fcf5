"""trioengine.connect against the real server: what a program asks and is told is as of an engine in its own process."""

import pytest
import trio
from clients import where_a_loss_fails
from params import GREEDY, LONG
from realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineClosed,
    InvalidConfig,
    RequestRejected,
    SamplingParams,
    SessionBusy,
    SessionEnded,
    TimedOut,
    WorkerLost,
    connect,
)
from trioengine.client.address import Address
from trioengine.client.connection import WINDOW
from trioengine.core.types import Cause, FinishReason


async def test_an_answer_streams(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        async with session.generate("hello", GREEDY) as generation:
            chunks = [chunk async for chunk in generation]
    text = "".join(chunk.text for chunk in chunks)
    assert text == reference(clients, [user("hello")])
    assert len(chunks) > 1
    assert {(chunk.token_ids, chunk.logprobs) for chunk in chunks} == {((), None)}
    completion = generation.completion
    assert (completion.text, completion.finish_reason, completion.cause) == (text, FinishReason.STOP, None)
    assert completion.usage.completion_tokens == len(text) + 1
    assert completion.request_id == generation.request_id
    assert generation.response_id.startswith("resp_")


async def test_a_conversation_goes_on(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        first = await (await entered(session.generate("hello", GREEDY))).result()
        async with session.generate([user("and"), user("then?")], GREEDY) as generation:
            second = await generation.result()
        history = [user("hello"), assistant(first.text), user("and"), user("then?")]
        assert second.text == reference(clients, history)
        assert session.history == [*history, assistant(second.text)]
        assert second.usage.cached_tokens > 0
        assert clients.engine.statistics().sessions == 1


async def entered(generation):
    return await generation.__aenter__()


async def test_a_request_aborted_before_it_is_entered_is_never_asked(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        generation = session.generate("never", LONG)
        generation.abort()
        async with generation:
            assert (await generation.result()).cause is Cause.CLIENT
        async with session.generate("hello", GREEDY) as following:
            assert (await following.result()).text == reference(clients, [user("hello")])
    assert clients.engine.statistics().received == 1


async def test_a_request_aborted_as_its_turn_comes_is_never_asked(autojump_clock, remote, clients):
    """In the very step in which the one before it is over."""
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        first, second = session.generate("hello", LONG), session.generate("never", LONG)
        await first.__aenter__()
        first.abort()
        nursery.start_soon(second.__aenter__)
        await wait_all_tasks_blocked()
        request = first._state
        settle, request._settle = request._settle, lambda: (settle(), second.abort())
        await second._state.settled.wait()
        assert second.completion.cause is Cause.CLIENT
        async with session.generate("hello", GREEDY) as following:
            assert (await following.result()).text == reference(clients, [user("hello")])
    assert clients.engine.statistics().received == 2


async def test_one_shot_calls_run_at_once(autojump_clock, remote, clients):
    texts = {}

    async def ask(name):
        texts[name] = (await remote.generate(name, GREEDY)).text

    async with trio.open_nursery() as nursery:
        for name in ("one", "two", "three"):
            nursery.start_soon(ask, name)
    assert texts == {name: reference(clients, [user(name)]) for name in texts}


async def test_a_history_to_begin_with(autojump_clock, remote, clients):
    history = [{"role": "system", "content": "be brief"}, user("hello"), assistant("hi")]
    async with remote.open_session(history=history) as session:
        assert session.history == history
        async with session.generate([{"role": "user", "content": [{"type": "text", "text": "more"}]}], GREEDY) as asked:
            assert (await asked.result()).text == reference(clients, [*history, user("more")])
        session.replace_history([user("other")])
        async with session.generate("more", GREEDY) as asked:
            assert (await asked.result()).text == reference(clients, [user("other"), user("more")])


async def test_a_long_history_does_not_flood_the_server(autojump_clock, remote, clients):
    history = [user("a") if index % 2 == 0 else assistant("b") for index in range(3 * WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=1)
    async with remote.open_session(history=history) as session:
        with pytest.raises(RequestRejected) as refused:
            async with session.generate("hello", params):
                pass
        assert refused.value.code == "context_length_exceeded"
        session.replace_history([])
        async with session.generate("hello", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("hello")])


async def test_every_parameter_is_sent(autojump_clock, remote, clients):
    expected = reference(clients, [user("hello")])
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        stop=expected[3:5],
        logit_bias={0: -1},
        stop_token_ids=(5,),
        seed=1,
        top_p=0.5,
        top_k=7,
    )
    completion = await remote.generate("hello", params)
    assert (completion.text, completion.finish_reason) == (expected[:3], FinishReason.STOP)


async def test_length_is_a_finish_reason(autojump_clock, remote, clients):
    completion = await remote.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert (completion.finish_reason, len(completion.text)) == (FinishReason.LENGTH, 3)


# ---- leaving, aborting, timeouts ----------------------------------------------------------------------------------


async def test_leaving_early_takes_the_turn_back(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        async with session.generate("hello", LONG) as generation:
            async for _ in generation:
                break
        assert (generation.completion.finish_reason, generation.completion.cause) == (FinishReason.ABORT, Cause.CLIENT)
        assert session.history == []
        async with session.generate("other", GREEDY) as following:
            assert (await following.result()).text == reference(clients, [user("other")])
    assert clients.engine.statistics().aborted == 1


async def test_what_was_kept_is_what_was_routed(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        async with session.generate("hello", LONG, keep_partial=True) as generation:
            async for _ in generation:
                break
        text = generation.completion.text
        assert 0 < len(text) < 200
        assert session.history == [user("hello"), assistant(text)]
        async with session.generate("more", GREEDY) as following:
            messages = [user("hello"), assistant(text), user("more")]
            assert (await following.result()).text == reference(clients, messages)


async def test_an_abort_ends_the_iteration(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", LONG) as generation:
        async for _ in generation:
            generation.abort()
        completion = generation.completion
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.CLIENT)
        assert reference(clients, [user("hello")], 200, ignore_eos=True).startswith(completion.text)
        assert session.history == []


async def test_an_abort_after_the_outcome_is_harmless(autojump_clock, remote):
    async with remote.open_session() as session, session.generate("hello", GREEDY) as generation:
        completion = await generation.result()
        generation.abort()
        assert generation.completion == completion
        assert len(session.history) == 2


async def test_a_timeout_is_an_abort(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        async with session.generate("hello", LONG, timeout=0.05) as generation:
            with pytest.raises(TimedOut) as caught:
                await generation.result()
        completion = generation.completion
        assert caught.value.completion == completion
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)
        assert 0 < len(completion.text) < 200


async def test_a_cancelled_read_goes_on(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", LONG) as generation:
        texts = []
        for _ in range(5):
            with trio.move_on_after(0.001):
                texts.append((await anext(generation)).text)
        texts += [chunk.text async for chunk in generation]
        assert "".join(texts) == reference(clients, [user("hello")], 200, ignore_eos=True)


async def test_leaving_by_an_exception(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        with pytest.raises(KeyError):
            async with session.generate("hello", LONG):
                raise KeyError
        assert session.history == []
        async with session.generate("hello", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("hello")])


@pytest.mark.parametrize("ticks", range(0, 40, 3))
async def test_cancelled_anywhere_the_next_request_goes_on(autojump_clock, remote, clients, ticks):
    """The turn is taken back, or was committed whole; the session is as usable as before."""
    async with remote.open_session() as session:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_after, ticks, scope)
                async with session.generate("hello", SamplingParams(temperature=0, max_tokens=3)) as generation:
                    await generation.result()
        before = session.history
        assert before in ([], [user("hello"), assistant(reference(clients, [user("hello")], 3))])
        async with session.generate("more", GREEDY) as following:
            assert (await following.result()).text == reference(clients, [*before, user("more")])


async def cancel_after(ticks, scope):
    for _ in range(ticks):
        await trio.lowlevel.checkpoint()
    scope.cancel()


# ---- refusals -----------------------------------------------------------------------------------------------------


async def test_a_second_request_is_refused_and_disturbs_nothing(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", GREEDY) as generation:
        with pytest.raises(SessionBusy, match="busy with a request; wait for its outcome, or open another session"):
            async with session.generate("more", GREEDY):
                pass
        with pytest.raises(SessionBusy):
            session.replace_history([])
        assert (await generation.result()).text == reference(clients, [user("hello")])


@where_a_loss_fails
async def test_the_death_of_the_worker(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        with pytest.raises(WorkerLost):
            async with session.generate("hello", LONG) as generation:
                await anext(generation)
                clients.simulation.worker.exit(-9)
                await generation.result()
        assert session.history == []
        async with session.generate("again", GREEDY, wait=True) as generation:
            assert (await generation.result()).text == reference(clients, [user("again")])


async def test_an_abort_by_the_operator_has_its_cause(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", LONG) as generation:
        await anext(generation)
        clients.engine.abort_all()
        completion = await generation.result()
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.ABORT_ALL)


async def test_what_is_over_says_so(autojump_clock, remote, clients):
    session = remote.open_session(label="mine")
    with pytest.raises(RuntimeError):
        await entered(session.generate("hello"))
    async with session:
        assert repr(session) == f"<Session {session.id} 'mine'>"
        with pytest.raises(RuntimeError):
            await session.__aenter__()
    with pytest.raises(SessionEnded, match=r"has ended \(.*\): open another one"):
        await entered(session.generate("hello"))
    await session.ended()
    remote.close()
    with pytest.raises(EngineClosed):
        async with remote.open_session():
            pass


async def test_the_model_is_named(autojump_clock, clients):
    async with connect("ws://localhost", model="toy", dial=clients.dial) as client:
        assert (await client.generate("hello", GREEDY)).text == reference(clients, [user("hello")])
    async with connect("ws://localhost", model="other", dial=clients.dial) as client:
        with pytest.raises(RequestRejected) as refused:
            await client.generate("hello")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


ADDRESSES = [
    ("ws://h", None, ("h", 80, False, "h", "/v1/realtime")),
    ("http://h:8000/", None, ("h", 8000, False, "h:8000", "/v1/realtime")),
    ("ws://h/v1", None, ("h", 80, False, "h", "/v1/realtime")),
    ("ws://h/v1/", "m", ("h", 80, False, "h", "/v1/realtime?model=m")),
    ("ws://h/v1/x", None, ("h", 80, False, "h", "/v1/x")),
    ("https://h", "a b", ("h", 443, True, "h", "/v1/realtime?model=a+b")),
    ("wss://[::1]:9/x?model=a&y=1", "b", ("::1", 9, True, "[::1]:9", "/x?y=1&model=b")),
]


@pytest.mark.parametrize(("url", "model", "expected"), ADDRESSES)
def test_addresses(url, model, expected):
    address = Address.parse(url, model)
    assert (address.host, address.port, address.is_secure, address.authority, address.target) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "ws://",
        "ws://h:x",
        "ws://u@h",
        "ws://h/#a",
        "ws://a..b",
        "http://☃.invalid",
        "http://h/ö",
        None,
    ],
)
async def test_what_is_no_address(url):
    with pytest.raises(InvalidConfig, match=r"^url must be"):
        async with connect(url):
            pass


async def test_what_is_no_key():
    with pytest.raises(InvalidConfig, match=r"^api_key must be"):
        async with connect("ws://h", api_key="ü"):
            pass
