"""The arguments of every public call: a wrong type or value names its field, an unknown name the nearest one."""

import inspect
import math
import re
from collections.abc import Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from helpers.sides import SIDES, open_api

from trioengine import InvalidConfig, RequestRejected, blocking, connect, open_engine
from trioengine.aio.calls import AsyncOnly

OPEN_SESSION = [
    ("open_session", (), {"label": 3}, "label must be a string, got 3"),
    ("open_session", (), {"history": 3}, "history must be a list of messages, got 3"),
    ("open_session", (), {"history": "x"}, "history must be a list of messages, got 'x'"),
    ("open_session", (), {"wait": "no"}, "wait must be True, False or None, got 'no'"),
    ("open_session", (), {"wait": 1}, "wait must be True, False or None, got 1"),
    ("open_session", (), {"overflow": "drop"}, "overflow must be 'refuse' or 'drop_oldest_turns', got 'drop'"),
]
TIMEOUTS = [
    (call, args, {"timeout": timeout}, "timeout must be positive seconds, got")
    for call, args in [
        ("open_session", ()),
        ("generate", ("x",)),
        ("session.generate", ("x",)),
        ("session.ask", ("x",)),
    ]
    for timeout in ("3", 0, -1, True, math.nan, 10**400, [3])
]
ASK = [
    (call, ("x",), options, message)
    for call in ("generate", "session.generate", "session.ask")
    for options, message in [
        ({"wait": "no"}, "wait must be True, False or None, got 'no'"),
        ({"label": 3}, "label must be a string, got 3"),
        ({"label": b"x"}, "label must be a string, got b'x'"),
        ({"params": {"max_tokens": 3}}, "params must be SamplingParams, got dict"),
        ({"max_tokens": "3"}, "max_tokens must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stop": 3}, "stop"),
        ({"tools": 3}, "tools must be a list of at most 128 functions, got 3"),
        ({"tool_choice": "some"}, "tool_choice must be one of auto, none, required, or a function"),
        ({"tools": [{"name": "f"}], "parallel_tool_calls": 1}, "parallel_tool_calls must be True or False, got 1"),
    ]
]
KEEP = [
    (call, ("x",), {"keep_partial": "no"}, "keep_partial must be True or False, got 'no'")
    for call in ("session.generate", "session.ask")
]
ABORT = [
    ("abort", (request,), {}, "request must be a request's id or its label, got") for request in (None, True, 3.5, b"x")
]
OPERATE = [
    ("abort_all", ("me",), {}, "cause must be one of client, disconnect, .*, got 'me'"),
    ("abort_all", (), {"keep_waiting": "no"}, "keep_waiting must be True or False, got 'no'"),
    ("sleep", (3,), {}, "level must be an integer from 1 to 2, got 3"),
    ("sleep", (), {"mode": "abrt"}, "mode must be abort, wait or keep, got 'abrt'"),
    ("sleep", (), {"mode": "wait", "timeout": "3"}, "timeout must be a number"),
    ("sleep", (), {"keep_waiting": 1}, "keep_waiting must be True or False, got 1"),
    ("wake", ("kv",), {}, "tags must be some of kv_cache, weights, got 'kv'"),
    ("wake", (3,), {}, "tags must be some of"),
    ("wake", (), {"reload": "no"}, "reload must be True or False, got 'no'"),
    ("update_weights", (3,), {}, "path must be a file or directory, got 3"),
    ("update_weights", ("x",), {"mode": None}, "mode must be"),
]
AWAITED = [
    ("drain", (), {"timeout": "3"}, "timeout must be seconds from 0, got '3'"),
    ("drain", (-1,), {}, "timeout must be seconds from 0, got -1"),
    ("check_invariants", (), {"timeout": None}, "timeout must be seconds from 0, got None"),
]
EVERYWHERE = OPEN_SESSION + TIMEOUTS + ASK + KEEP + ABORT
UNKNOWN = [
    ("open_session", (), "labl", "label"),
    ("open_session", (), "time_out", "timeout"),
    ("generate", ("x",), "wat", "wait"),
    ("session.generate", ("x",), "keep_part", "keep_partial"),
    ("ask", ("x",), "max_token", "max_tokens"),
    ("session.ask", ("x",), "max_token", "max_tokens"),
    ("abort", (), "requst", "request"),
]
UNKNOWN_OPERATE = [
    ("abort_all", (), "keep_waitin", "keep_waiting"),
    ("sleep", (), "modes", "mode"),
    ("sleep", (), "levl", "level"),
    ("wake", (), "relod", "reload"),
    ("update_weights", ("x",), "mod", "mode"),
]


@asynccontextmanager
async def open_any(side):
    """The API of a side, or of a blocking engine."""
    if side == "blocking":
        with blocking.Engine(partial(open_api, "engine")) as engine:
            yield engine
    else:
        async with open_api(side) as api:
            yield api


ALL_SIDES = (*SIDES, "blocking")
COVERED = {
    "engine": EVERYWHERE + OPERATE + AWAITED,
    "client": EVERYWHERE,
    "blocking": EVERYWHERE + OPERATE,
}


async def use(api, call, args, options):
    """Make the call, and enter or await the thing that it gives."""
    async with AsyncExitStack() as stack:
        if call.startswith("session."):
            session = api.open_session()
            api = session if isinstance(session, blocking.Session) else await stack.enter_async_context(session)
        given = getattr(api, call.removeprefix("session."))(*args, **options)
        if isinstance(given, Coroutine):
            await given
        elif isinstance(given, AsyncOnly):
            await stack.enter_async_context(given)


@pytest.mark.parametrize("side", ALL_SIDES)
async def test_a_wrong_argument_is_refused_by_its_name(autojump_clock, side):
    async with open_any(side) as api:
        for call, args, options, message in COVERED[side]:
            with pytest.raises(RequestRejected, match=message) as refused:
                await use(api, call, args, options)
            assert refused.value.param == message.split()[0].partition("[")[0], (call, options)


@pytest.mark.parametrize("side", ALL_SIDES)
async def test_an_unknown_argument_names_the_nearest(autojump_clock, side):
    async with open_any(side) as api:
        for call, args, name, nearest in UNKNOWN + (UNKNOWN_OPERATE if side != "client" else []):
            function = re.escape(call.removeprefix("session.") + "()")
            with pytest.raises(TypeError, match=f"^{function} has no argument '{name}'; did you mean '{nearest}'"):
                await use(api, call, args, {name: 1})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": 3}, InvalidConfig, "model"),
        ({"on_progress": 3}, InvalidConfig, "on_progress must be a function, got 3"),
        ({"on_load": "x"}, InvalidConfig, "on_load must be a function, got 'x'"),
        ({"max_num_seqs": "4"}, InvalidConfig, "max_num_seqs must be"),
        ({"on_lod": print}, TypeError, r"open_engine\(\) has no argument 'on_lod'; did you mean 'on_load'"),
    ],
)
async def test_of_opening_an_engine(options, error, message):
    with pytest.raises(error, match=message):
        await open_engine(**options).__aenter__()
    with pytest.raises(error, match=message):
        blocking.open_engine(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"url": 3}, InvalidConfig, "url must be"),
        ({"api_key": 3}, InvalidConfig, "api_key must be"),
        ({"model": 3}, InvalidConfig, "model must be a name, got 3"),
        ({"modl": "x"}, TypeError, r"connect\(\) has no argument 'modl'; did you mean 'model'"),
    ],
)
async def test_of_connecting(options, error, message):
    options = {"url": "ws://localhost"} | options
    with pytest.raises(error, match=message):
        await connect(**options).__aenter__()
    with pytest.raises(error, match=message):
        blocking.connect(**options)


@pytest.mark.parametrize("name", ["dial", "on_state"])
async def test_of_the_callbacks_of_a_client(name):
    with pytest.raises(InvalidConfig, match=f"{name} must be a function, got 3"):
        await connect("ws://localhost", **{name: 3}).__aenter__()


@pytest.mark.parametrize("side", ALL_SIDES)
async def test_a_whole_answer_has_the_name_that_a_session_gives_it(autojump_clock, side):
    async with open_any(side) as api:
        answers = []
        for call in (api.ask, api.generate):
            given = call("x", max_tokens=3, temperature=0)
            answers.append(await given if inspect.isawaitable(given) else given)
        assert answers[0].text == answers[1].text != ""


@pytest.mark.parametrize("side", ALL_SIDES)
async def test_a_bad_history_is_refused_before_the_session_is_entered(autojump_clock, side):
    async with open_any(side) as api:
        with pytest.raises(RequestRejected, match="history must be a list of messages"):
            api.open_session(history="x")


@pytest.mark.parametrize("side", ALL_SIDES)
@pytest.mark.parametrize(
    ("role", "problem"),
    [
        ({"rolle": "user"}, r"is missing: the message has \['rolle', 'content'\]"),
        ({"role": "usr"}, "must be one of system, .*, got 'usr'"),
        ({"role": ["user"]}, r"must be one of system, .*, got \['user'\]"),
    ],
)
async def test_a_message_without_a_role(autojump_clock, side, role, problem):
    async with open_any(side) as api:
        for call, args, options in [
            ("generate", ([role | {"content": "x"}],), {}),
            ("open_session", (), {"history": [role | {"content": "x"}]}),
        ]:
            with pytest.raises(RequestRejected, match=rf"(prompt|messages|history)\[0\]\.role {problem}$"):
                await use(api, call, args, options)


async def test_a_key_of_a_message_that_a_client_cannot_send(autojump_clock):
    async with open_api("client") as client:
        with pytest.raises(RequestRejected, match=r"prompt\[0\]\.name cannot be sent: a message has role and content"):
            await client.generate([{"role": "user", "content": "x", "name": "ann"}])
