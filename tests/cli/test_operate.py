"""`trioengine sleep`, `wake` and `status`, with a server on a simulated worker."""

import json
import re

import pytest
from helpers.operated import served
from trio.testing import memory_stream_pair

from trioengine.cli.app import run
from trioengine.cli.operate import _request_state, _sentence
from trioengine.client.address import Endpoint
from trioengine.core.errors import ConnectionLost
from trioengine.core.lifecycle import Power


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("CONNECT", "ADMIN_KEY", "LEVEL", "MODE", "TIMEOUT", "TAGS", "RELOAD", "JSON"):
        monkeypatch.delenv(f"TRIOENGINE_{name}", raising=False)


@pytest.fixture(scope="module")
def server():
    with served() as (url, engine):
        yield url, engine


@pytest.fixture
def said(server, capsys):
    """What a command prints, with its exit code; the engine is awake at the end."""
    url, engine = server

    def call(*command):
        code = run([*command, "--connect", url])
        printed = capsys.readouterr()
        assert (printed.err == "") == (code == 0)
        return code, printed.out + printed.err

    yield call
    assert run(["wake", "--connect", url]) == 0
    assert engine.state is Power.AWAKE


STORY = [
    (["status"], "awake: weights loaded, kv cache resident; weight version 1\n"),
    (
        ["sleep", "--level", "1", "--mode", "keep"],
        "asleep at level 1: weights in host memory, kv cache released; weight version 1\n",
    ),
    (
        ["sleep", "--level", "2", "--mode", "wait", "--timeout", "5"],
        "asleep at level 2: weights discarded, kv cache released; weight version 1\n",
    ),
    (["wake", "--tags", "kv_cache"], "asleep at level 2: weights discarded, kv cache resident; weight version 1\n"),
    (["wake", "--no-reload"], "asleep at level 2: weights discarded, kv cache resident; weight version 1\n"),
    (["status"], "asleep at level 2: weights discarded, kv cache resident; weight version 1\n"),
    (["wake"], "awake: weights loaded, kv cache resident; weight version 1\n"),
    (["sleep"], "asleep at level 1: weights in host memory, kv cache released; weight version 1\n"),
    (
        ["wake", "--tags", "weights", "--tags", "kv_cache"],
        "awake: weights loaded, kv cache resident; weight version 1\n",
    ),
]


def test_the_story(said):
    for _ in range(2):
        for command, sentence in STORY:
            assert said(*command) == (0, sentence)


@pytest.mark.parametrize("power", ["loading", "falling_asleep", "restarting"])
def test_a_change_has_no_parts(power):
    """During a change the server does not report them."""
    state = {"is_sleeping": False, "level": None, "tags": [], "power": power, "weight_version": 2}
    assert _sentence(state) == f"{power.replace('_', ' ')}; weight version 2"


def test_as_json(said):
    code, printed = said("sleep", "--json")
    state = {"is_sleeping": True, "level": 1, "tags": ["kv_cache", "weights"], "power": "asleep", "weight_version": 1}
    assert (code, json.loads(printed)) == (0, state)
    assert json.loads(said("status", "--json")[1]) == state


def test_what_cannot_be_done(said):
    said("sleep", "--level", "2")
    code, printed = said("sleep", "--level", "1")
    assert (code, printed) == (1, "trioengine: error: it sleeps at level 2: the weights are discarded; wake it first\n")


MISTAKES = [
    (["sleep", "--level", "3"], "--level must be an integer from 1 to 2, got 3."),
    (["sleep", "--mode", "later"], "--mode must be abort, wait or keep, got 'later'."),
    (["sleep", "--timeout", "5"], "error: --timeout is for mode wait, not abort"),
    (["sleep", "--mode", "wait", "--timeout", "-1"], "error: --timeout must be a number from 0"),
    (["wake", "--tags", "lora"], "error: --tags must be some of kv_cache, weights, got 'lora'"),
    (["wake", "--tags", ""], "error: --tags must be some of kv_cache, weights, got ''"),
    (["status", "--admin-key", "ü"], "error: --admin-key must be one key of visible ASCII characters"),
    (["status", "--config", "x"], "--config"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[" ".join(command) for command, _ in MISTAKES])
def test_mistakes(said, command, message):
    code, printed = said(*command)
    assert code == 2
    assert message in printed
    assert said("status") == (0, "awake: weights loaded, kv cache resident; weight version 1\n")


@pytest.mark.parametrize("command", ["sleep", "wake", "status"])
def test_keys(capsys, monkeypatch, command):
    with served(api_key=("user",), admin_key=("operator",)) as (url, _):
        for key, message in (
            (None, "this needs a key (--admin-key)"),
            ("wrong", "this key is not accepted (--admin-key)"),
            ("user", "this is for operators, and needs their key (--admin-key)"),
        ):
            assert run([command, "--connect", url, *(["--admin-key", key] if key else [])]) == 2
            assert capsys.readouterr().err == f"trioengine: error: {message}\n"
        monkeypatch.setenv("TRIOENGINE_ADMIN_KEY", "operator")
        assert run([command, "--connect", url]) == 0


def test_a_server_without_a_key_for_operators(capsys):
    with served(api_key=("user",)) as (url, _):
        assert run(["status", "--connect", url, "--admin-key", "user"]) == 2
        message = "this server has no key for operators: start it with --admin-key"
        assert capsys.readouterr().err == f"trioengine: error: {message}\n"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/realtime", "/v1/realtime?model=x"])
def test_any_address_of_the_server_will_do(server, capsys, path):
    url = server[0].replace("ws:", "http:")
    assert run(["status", "--connect", url + path]) == 0
    assert capsys.readouterr().out == "awake: weights loaded, kv cache resident; weight version 1\n"


def test_a_path_before_the_servers_own(server, capsys):
    """As behind a proxy; here the path is not stripped."""
    assert run(["status", "--connect", f"{server[0]}/below/v1"]) == 2
    assert capsys.readouterr().err == (
        "trioengine: error: no route '/below/v1/is_sleeping'; did you mean '/is_sleeping'?\n"
    )


def test_no_tls(server, capsys):
    url = server[0].replace("ws:", "https:")
    assert run(["status", "--connect", url]) == 1
    remedy = "the server does not speak TLS; use http://127"
    assert re.search(rf"cannot connect to https://127\.0\.0\.1:\d+: {remedy}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        (
            "http://127.0.0.1:1",
            1,
            "cannot connect to http://127.0.0.1:1: connection refused; is 'trioengine serve' running there?\n",
        ),
        ("somewhere", 2, "error: --connect must be an address like http://localhost:8000 or ws://"),
        ("http://a..b:1", 2, "error: --connect must be an address like http://localhost:8000 or ws://"),
    ],
)
def test_no_server(capsys, url, code, message):
    assert run(["sleep", "--connect", url]) == code
    assert message in capsys.readouterr().err


STRANGERS = [
    (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "toy does not answer as trioengine does: HTTP status 200"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "toy does not answer as trioengine does: HTTP status 200"),
    (b"HTTP/1.1 500 Oh\r\ncontent-length: 4\r\n\r\nnull", "toy does not answer as trioengine does: HTTP status 500"),
    (
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        "the server closed the connection before the end of its response",
    ),
    (b"", "the server closed the connection before the end of its response"),
    (b"SSH-2.0", "the server closed the connection before the end of its response"),
]


@pytest.mark.parametrize(("answer", "message"), STRANGERS, ids=range(len(STRANGERS)))
async def test_another_server(answer, message):
    async def dial():
        ours, theirs = memory_stream_pair()
        await theirs.send_all(answer)
        await theirs.send_eof()
        return ours

    with pytest.raises(ConnectionLost) as lost:
        await _request_state(Endpoint("toy", "/", [], dial), "POST", "/sleep")
    assert str(lost.value) == message


@pytest.mark.parametrize("command", ["status", "sleep", "wake"])
def test_without_connect_it_is_the_local_server(monkeypatch, command):
    asked = []
    monkeypatch.setattr("trioengine.cli.operate.operate", lambda url, *arguments, **how: asked.append(url))
    assert run([command]) == 0
    assert asked == ["http://127.0.0.1:8000"]
