"""Sleeping and waking over HTTP: the answers to an operator, and the refusals of other clients meanwhile."""

import pytest
import trio
from helpers.clients import CHAT, Clients, chat, events_of
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, EngineConfig, SamplingParams
from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.testing import simulated_engine

AWAKE = {"is_sleeping": False, "level": None, "tags": [], "power": "awake", "weight_version": 1}
ALL = ["kv_cache", "weights"]
LONG = {"stream": True, "max_tokens": 100}


def asleep(level, tags=ALL, **fields):
    return {"is_sleeping": True, "level": level, "tags": tags, "power": "asleep", "weight_version": 1} | fields


async def post(clients, target, content=None):
    return await clients.request("POST", target, content)


async def state(clients):
    answer = await clients.request("GET", "/is_sleeping")
    assert answer.status == 200
    return answer.json


async def until(clients, power):
    while clients.engine.state is not power:
        await clients.engine.runtime.gate.changed()


async def streaming(client):
    """A stream, and what came of it until now."""
    await client.send("POST", CHAT, chat(**LONG))
    await client.head()
    return await client.piece()


def text_of(data):
    """What a stream said, up to an error if there is one; and that error's code."""
    *events, done = events_of(data)
    assert done == "[DONE]"
    code = events.pop()["error"]["code"] if "error" in events[-1] else None
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events), code


async def refused(clients):
    """Nothing is admitted, and everybody is told why."""
    for stream in (False, True):
        answer = await clients.chat(stream=stream)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (answer.error["type"], answer.error["code"]) == ("server_error", "asleep")
        assert answer.error["retry_after"] == 1.0
    with pytest.raises(EngineAsleep):
        await clients.engine.generate("hello", SamplingParams(max_tokens=1))
    answer = await clients.request("GET", "/ready")
    assert (answer.status, answer.json, answer.headers["retry-after"]) == (503, {"state": "asleep"}, "1")
    assert (await clients.request("GET", "/health")).status == 200


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_the_story(autojump_clock, clients, mode):
    """A stream runs, the engine sleeps, is half awake, is awake; and all of it again at the other level."""
    whole = text_of((await clients.chat(**LONG)).body)
    for level in (1, 2):
        async with clients.connect() as client:
            begun = await streaming(client)
            answer = await post(clients, f"/sleep?level={level}&mode={mode}")
            assert (answer.status, answer.json) == (200, asleep(level)) == (200, await state(clients))
            assert clients.engine.statistics().suspended == (mode == "keep")
            await refused(clients)
            answer = await post(clients, "/wake_up?tags=kv_cache")
            assert (answer.status, answer.json) == (200, asleep(level, ["weights"]))
            await refused(clients)
            answer = await post(clients, "/wake_up")
            assert (answer.status, answer.json) == (200, AWAKE) == (200, await state(clients))
            assert (await clients.request("GET", "/ready")).json == {"state": "awake"}
            text, code = text_of(begun + await client.rest())
            assert code == ("sleep" if mode == "abort" else None)
            assert text == whole[0] if mode != "abort" else whole[0].startswith(text)
        assert (await clients.chat()).status == 200


async def test_a_whole_answer_that_is_aborted(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(max_tokens=400))
        await wait_all_tasks_blocked()
        await post(clients, "/sleep")
        answer = await client.answer()
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "sleep", "1")
    assert answer.error["message"] == "the request was aborted by an operator: the engine sleeps, or gets other weights"
    await post(clients, "/wakeup")


async def test_what_is_so_already_is_no_error(autojump_clock, clients):
    assert (await post(clients, "/wake_up")).json == AWAKE
    for _ in range(2):
        assert (await post(clients, "/sleep")).json == asleep(1)
    assert (await post(clients, "/sleep?level=2")).json == asleep(2)
    for _ in range(2):
        assert (await post(clients, "/wakeup?tags=weights&tags=kv_cache")).json == AWAKE


async def test_an_empty_object_is_no_body(autojump_clock, clients):
    assert (await post(clients, "/sleep", {})).json == asleep(1)
    assert (await post(clients, "/wake_up?tags=weights,kv_cache", {})).json == AWAKE


async def test_waiting_is_bounded(autojump_clock, clients):
    """New requests are refused meanwhile; what runs goes on, and is aborted when its time is over."""
    async with clients.connect() as client, trio.open_nursery() as nursery:
        await client.send("POST", CHAT, chat(stream=True, max_tokens=400))
        await client.head()
        before = trio.current_time()
        nursery.start_soon(post, clients, "/sleep?mode=wait&timeout=0.5")
        await until(clients, Power.FALLING_ASLEEP)
        assert (await state(clients)) == AWAKE | {"power": "falling_asleep"}
        await refused(clients)
        text, code = text_of(await client.rest())
        assert (code, len(text) > 10) == ("sleep", True)
        assert 0.5 <= trio.current_time() - before < 0.6
    await post(clients, "/wake_up")


async def test_ready_says_asleep_from_the_first_step(autojump_clock, clients):
    """The engine is still awake, and admits nothing."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clients.engine.sleep)
        while not clients.engine.runtime.gate.is_change_pending:
            await trio.lowlevel.checkpoint()
        route = clients.server.connections._routes["/ready"].handlers["GET"]
        assert (await route(None)).status == 503
    await post(clients, "/wake_up")


@pytest.mark.parametrize("request_", ["/sleep?mode=wait", "/sleep?mode=wait&timeout=50"])
async def test_who_leaves_abandons_its_wait_alone(autojump_clock, clients, request_):
    async with clients.connect() as client, trio.open_nursery() as nursery:
        await streaming(client)
        async with clients.connect() as operator:
            await operator.send("POST", request_)
            await until(clients, Power.FALLING_ASLEEP)
        nursery.start_soon(client.rest)
        await until(clients, Power.ASLEEP)
        async with clients.connect() as operator:
            await operator.send("POST", "/wake_up")
            await until(clients, Power.WAKING)
        await until(clients, Power.AWAKE)
    assert await state(clients) == AWAKE


async def test_a_wake_that_fails_changes_nothing(autojump_clock, clients):
    await post(clients, "/sleep?level=2")
    clients.simulation.worker.runner.fail_wakes = 1
    answer = await post(clients, "/wake_up")
    assert (answer.status, answer.error["code"], answer.error["type"]) == (409, "transition_failed", "server_error")
    assert "made not to wake" in answer.error["message"]
    assert await state(clients) == asleep(2)
    answer = await post(clients, "/sleep?level=1")
    assert (answer.status, answer.error["code"]) == (409, "transition_failed")
    assert (await post(clients, "/wake_up")).json == AWAKE


async def test_weights_that_are_left_asleep(autojump_clock, clients):
    await post(clients, "/sleep?level=2")
    assert (await post(clients, "/wake_up?reload=false")).json == asleep(2, ["weights"])
    await refused(clients)
    assert (await post(clients, "/wake_up?reload=true")).json == AWAKE


async def test_while_it_loads_or_drains(autojump_clock):
    async with trio.open_nursery() as nursery:
        clients = Clients(Engine(EngineConfig(model="toy")), None, nursery)
        answer = await post(clients, "/sleep")
        assert (answer.status, answer.error["message"]) == (409, "the engine is loading")
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as client, clients.connect() as operator:
            await streaming(client)
            await operator.send("POST", "/sleep?mode=wait")
            await until(clients, Power.FALLING_ASLEEP)
            nursery.start_soon(engine.drain)
            answer = await operator.answer()
            assert (answer.status, answer.error["message"]) == (409, "the engine is draining")
            assert (await clients.request("GET", "/ready")).json == {"state": "draining"}


async def test_the_worker_dies_asleep(autojump_clock, clients):
    """Nobody needs it before it is woken."""
    await post(clients, "/sleep")
    clients.simulation.worker.exit(-9)
    await clients.engine.runtime.gate.changed()
    assert await state(clients) == asleep(1)
    assert (await clients.request("GET", "/health")).status == 200
    assert len(clients.simulation.workers) == 1
    assert (await post(clients, "/wake_up")).json == AWAKE
    assert len(clients.simulation.workers) == 2


async def test_abort_all_counts_what_is_suspended(autojump_clock, clients):
    async with clients.connect() as client:
        await streaming(client)
        await post(clients, "/sleep?mode=keep")
        assert (await post(clients, "/abort_request", {"abort_all": True})).json == {"aborted": 1}
        assert text_of(await client.rest())[1] == "abort_all"
    await post(clients, "/wake_up")


WHO = [("POST", "/sleep", 200), ("POST", "/wake_up", 200), ("POST", "/wakeup", 200), ("GET", "/is_sleeping", 200)]


@pytest.mark.parametrize(("method", "path", "allowed"), [*WHO, ("POST", "/update_weights", 400)])
async def test_who_may(autojump_clock, method, path, allowed):
    """Operators alone; where there is no key for them, nobody."""
    for admin_key, statuses in (("operator",), (401, 403, allowed)), ((), (403, 403, 403)):
        async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
            clients = Clients(engine, simulation, nursery, api_key=("user",), admin_key=admin_key)
            for key, status in zip(("nobody", "user", "operator"), statuses, strict=True):
                answer = await clients.request(method, path, authorization=f"Bearer {key}")
                assert (key, answer.status) == (key, status)


REFUSED = [
    ("/sleep?level=3", "level", "level must be 1 or 2, got '3'"),
    ("/sleep?level=", "level", "level must be 1 or 2, got ''"),
    ("/sleep?level=1&level=2", "level", "level is given 2 times"),
    ("/sleep?mode=later", "mode", "mode must be abort, wait or keep, got 'later'"),
    ("/sleep?timeout=5", "timeout", "timeout is for mode wait, not abort"),
    ("/sleep?mode=wait&timeout=soon", "timeout", "timeout must be a number from 0 to 1000000000, got 'soon'"),
    ("/sleep?mode=wait&timeout=nan", "timeout", "timeout must be a number from 0 to 1000000000, got nan"),
    ("/sleep?mode=wait&timeout=-1", "timeout", "timeout must be a number from 0 to 1000000000, got -1.0"),
    ("/sleep?tags=weights", "tags", "unknown parameter 'tags'; the parameters are level, mode, timeout"),
    ("/wake_up?tags=lora", "tags", "tags must be some of kv_cache, weights, got 'lora'"),
    ("/wake_up?tags=weights,", "tags", "tags must be some of kv_cache, weights, got ''"),
    ("/wakeup?tags=", "tags", "tags must be some of kv_cache, weights, got ''"),
    ("/wake_up?reload=maybe", "reload", "reload must be true or false, got 'maybe'"),
    ("/wake_up?level=1", "level", "unknown parameter 'level'; the parameters are reload, tags"),
]


@pytest.mark.parametrize(("target", "param", "message"), REFUSED, ids=[target for target, *_ in REFUSED])
async def test_what_is_refused(autojump_clock, clients, target, param, message):
    answer = await post(clients, target)
    assert (answer.status, answer.error["param"], answer.error["message"]) == (400, param, message)
    assert await state(clients) == AWAKE


@pytest.mark.parametrize("target", ["/sleep", "/wake_up"])
async def test_a_body_is_refused(autojump_clock, clients, target):
    """It would be ignored, and the engine sleep at another level than is asked for."""
    answer = await post(clients, target, {"level": 2})
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["message"] == f"{target} takes its parameters in its query, and no body"
    assert await state(clients) == AWAKE
