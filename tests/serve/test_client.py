"""trioengine.connect against the real server: addresses, keys, models and states; the rest is in tests/conformance."""

import pytest
import trio
from helpers.params import GREEDY, LONG
from helpers.realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineClosed,
    InvalidConfig,
    RequestRejected,
    SamplingParams,
    connect,
)
from trioengine.client.address import Address
from trioengine.client.connection import WINDOW
from trioengine.core.types import Cause


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


async def test_the_model_is_named(autojump_clock, clients):
    async with connect("ws://localhost", model="toy", dial=clients.dial) as client:
        assert (await client.generate("hello", GREEDY)).text == reference(clients, [user("hello")])
    async with connect("ws://localhost", model="other", dial=clients.dial) as client:
        with pytest.raises(RequestRejected) as refused:
            await client.generate("hello")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_the_response_has_the_servers_id(autojump_clock, remote):
    async with remote.open_session() as session:
        assert repr(session) == f"<Session {session.id}>"
        async with session.generate("hello", GREEDY) as generation:
            await generation.result()
    assert generation.response_id.startswith("resp_")


async def test_a_closed_client_opens_no_session(autojump_clock, remote):
    async with remote.open_session():
        remote.close()
        with pytest.raises(EngineClosed):
            async with remote.open_session():
                pass


async def test_each_session_reports_the_states_of_the_engine(autojump_clock, clients):
    told = []
    async with connect("ws://localhost", dial=clients.dial, on_state=told.append) as client:
        async with client.open_session():
            await clients.engine.sleep()
            await wait_all_tasks_blocked()
            async with client.open_session():  # a connection of its own
                await wait_all_tasks_blocked()
                await clients.engine.wake()
                await wait_all_tasks_blocked()
    assert told == ["sleeping", "sleeping", "awake", "awake"]


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
