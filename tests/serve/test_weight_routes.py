"""Other weights over HTTP: by their name in one directory, and by nothing else."""

import pytest
import trio
from helpers.clients import CHAT, chat, events_of, open_clients

from trioengine import EngineConfig, InvalidConfig
from trioengine.core.lifecycle import Power
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve


@pytest.fixture
def weights_dir(tmp_path):
    """Two checkpoints, a link to one of them, and links that lead nowhere or elsewhere."""
    inside, outside = tmp_path / "checkpoints", tmp_path / "secret"
    for directory in (inside / "one", inside / "two", outside):
        directory.mkdir(parents=True)
    (inside / "model.gguf").touch()
    (inside / "latest").symlink_to("two")
    (inside / "out").symlink_to(outside)
    (inside / "up").symlink_to("..")
    (inside / "here").symlink_to(".")
    (inside / "loop").symlink_to("loop")
    (inside / "nowhere").symlink_to("nothing")
    (inside / "line\nbreak").mkdir()
    (inside / "odd").symlink_to("line\nbreak")
    return inside


@pytest.fixture
async def clients(autojump_clock, weights_dir):
    async with open_clients(weights_dir=str(weights_dir)) as clients:
        yield clients


async def update(clients, name, **fields):
    return await clients.request("POST", "/update_weights", {"name": name} | fields)


@pytest.mark.parametrize(("name", "found"), [("one", "one"), ("latest", "two"), ("model.gguf", "model.gguf")])
async def test_by_name(autojump_clock, clients, weights_dir, name, found):
    before = (await clients.chat(max_tokens=20)).json["choices"]
    answer = await update(clients, name)
    assert (answer.status, answer.json["weight_version"], answer.json["power"]) == (200, 2, "awake")
    assert clients.engine.weights == (str(weights_dir / found), 2)
    assert (await clients.chat(max_tokens=20)).json["choices"] != before
    assert (await update(clients, name, mode=None, timeout=None)).json["weight_version"] == 3


NO_NAMES = ["", ".", "..", "/", "/etc", "../secret", "one/../two", "a\\b", "one/", "one\0", "one\n", "x" * 300]
LEAVING = ["out", "up", "here", "loop", "nowhere", "three", "~", "%2e%2e"]


@pytest.mark.parametrize("name", NO_NAMES + LEAVING)
async def test_no_name_leaves_the_directory(autojump_clock, clients, name):
    answer = await update(clients, name)
    known = (404, "weights_not_found") if name in [*LEAVING, "x" * 300] else (400, "invalid_value")
    assert ((answer.status, answer.error["code"]), answer.error["param"]) == (known, "name")
    assert "secret" not in answer.error["message"] or "secret" in name
    assert clients.engine.power.weight_version == 1


@pytest.mark.parametrize("name", ["line\nbreak", "odd"])
async def test_what_has_no_printable_path_is_refused_by_its_name(autojump_clock, clients, weights_dir, name):
    answer = await update(clients, name)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "name")
    assert str(weights_dir) not in answer.error["message"]
    assert answer.error["message"].startswith("name ")


REFUSED = [
    ({}, "missing_parameter", "name"),
    ({"name": None}, "missing_parameter", "name"),
    ({"name": 1}, "invalid_type", "name"),
    ({"name": "\ud800"}, "invalid_value", "name"),
    ({"name": "one", "path": "/etc"}, "unsupported_parameter", "path"),
    ({"name": "one", "mode": "later"}, "invalid_value", "mode"),
    ({"name": "one", "mode": 1}, "invalid_type", "mode"),
    ({"name": "one", "timeout": 1}, "invalid_value", "timeout"),
    ({"name": "one", "mode": "wait", "timeout": "1"}, "invalid_type", "timeout"),
    ({"name": "one", "mode": "wait", "timeout": True}, "invalid_type", "timeout"),
    ({"name": "one", "mode": "wait", "timeout": -1}, "invalid_value", "timeout"),
    (["one"], "invalid_type", None),
    (b"one", "invalid_json", None),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused(autojump_clock, clients, body, code, param):
    answer = await clients.request("POST", "/update_weights", body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert clients.engine.power.weight_version == 1


async def test_without_a_directory(autojump_clock):
    async with open_clients() as clients:
        answer = await update(clients, "one")
        assert (answer.status, answer.error["code"]) == (403, "no_weights_dir")
        assert answer.error["message"] == "the server was started without --weights-dir: it has no other weights"


async def test_a_directory_that_went_away(autojump_clock, clients, weights_dir):
    weights_dir.rename(weights_dir.with_name("elsewhere"))
    assert (await update(clients, "one")).status == 404


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_with_a_stream(autojump_clock, clients, mode):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, max_tokens=100))
        await client.head()
        assert (await update(clients, "one", mode=mode)).status == 200
        *_, last, done = events_of(await client.rest())
        assert done == "[DONE]"
        if mode == "abort":
            assert last["error"]["code"] == "sleep"
        else:
            assert last["choices"][0]["finish_reason"] == "length"


async def test_asleep(autojump_clock, clients):
    """They are loaded when it wakes, and those of before no more."""
    await clients.request("POST", "/sleep?level=2")
    await clients.request("POST", "/wake_up?reload=0")
    answer = await update(clients, "one")
    assert (answer.json["is_sleeping"], answer.json["weight_version"]) == (False, 2)
    await clients.request("POST", "/sleep")
    answer = await update(clients, "two")
    assert (answer.json["is_sleeping"], answer.json["weight_version"]) == (True, 3)
    assert (await clients.request("POST", "/wake_up")).json["weight_version"] == 3
    assert (await clients.chat()).status == 200


async def test_the_worker_dies_of_them(autojump_clock, clients):
    async with clients.connect() as client:
        clients.simulation.worker.stall()
        await client.send("POST", "/update_weights", {"name": "one"})
        while clients.engine.state is not Power.UPDATING:
            await clients.engine.runtime.gate.changed()
        assert (await clients.request("GET", "/ready")).json == {"state": "asleep"}
        clients.simulation.worker.exit(-9)
        answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (409, "transition_failed")
    await clients.engine.ready()
    assert clients.engine.power.weight_version == 1
    assert (await clients.chat()).status == 200


async def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(InvalidConfig, match=r"^weights_dir must be a directory, got "):
        await serve(EngineConfig(model="toy"), ServeConfig(port=0, weights_dir=str(tmp_path / "none")))
    for value in ("", 1):
        with pytest.raises(InvalidConfig, match=r"^weights_dir must be a directory, got "):
            ServeConfig(weights_dir=value)


async def test_a_client_that_leaves(autojump_clock, clients):
    async with clients.connect() as client, clients.connect() as operator:
        await client.send("POST", CHAT, chat(stream=True, max_tokens=100))
        await client.head()
        await operator.send("POST", "/update_weights", {"name": "one", "mode": "wait"})
        while clients.engine.state is not Power.UPDATING:
            await clients.engine.runtime.gate.changed()
        await trio.aclose_forcefully(operator.stream)
        await client.rest()
        await clients.engine.ready()
    assert clients.engine.power.weight_version == 2
