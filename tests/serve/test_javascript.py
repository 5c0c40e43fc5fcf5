"""docs/trioengine.mjs, in node and in a browser, against a server on loopback with a simulated worker."""

import json
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from helpers.browser import find_browser, served_page
from helpers.loopback import on_loopback
from helpers.realtime_texts import assistant, reference, user

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = Path(__file__).with_name("javascript_client.mjs")
ROOM = Path(__file__).with_name("javascript_room.mjs")
LOSSES = Path(__file__).with_name("javascript_losses.mjs")
STRANGE = Path(__file__).with_name("javascript_strange.mjs")
MISUSE = Path(__file__).with_name("javascript_misuse.mjs")
REFUSALS = Path(__file__).with_name("javascript_refusals.mjs")


def node_with_websocket():
    """The command of a node that has a WebSocket; None without one."""
    node = shutil.which("node")
    for options in ([], ["--experimental-websocket"]) if node is not None else ():
        check = [node, *options, "-e", "process.exit(globalThis.WebSocket ? 0 : 1)"]
        if subprocess.run(check, capture_output=True).returncode == 0:
            return [node, *options]
    return None


def required_node():
    command = node_with_websocket()
    if command is None:
        pytest.skip("no node with a WebSocket")
    return command


def required_browser():
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium")
    return browser


async def check(run, **options):
    """Run the program with the URLs of a server and of an unused port, and check its results."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        unused_address = f"ws://127.0.0.1:{unused.getsockname()[1]}"
    async with on_loopback(api_key=("secret",), admin_key=("admin",), **options) as server:
        results = await trio.to_thread.run_sync(run, f"http://127.0.0.1:{server.port}", unused_address)
        assert isinstance(results, dict), results
        check_results(
            results, partial(reference, SimpleNamespace(engine=server.engine)), unused_address.partition("//")[2]
        )


def in_node(program, *arguments):
    """The results of a program in node."""
    command = required_node()
    script = f"import {{ run }} from '{program}'; console.log(JSON.stringify(await run(...{json.dumps(arguments)})));"
    done = subprocess.run([*command, "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_in_node():
    await check(partial(in_node, PROGRAM))


async def test_in_a_browser(tmp_path):
    browser = required_browser()
    with served_page() as page:
        await check(partial(page.run, browser, tmp_path, PROGRAM), allowed_origin=(page.origin,))


async def refused(run, **options):
    """The error of a session beside another one."""
    async with on_loopback(api_key=("secret",), **options) as server:
        return await trio.to_thread.run_sync(run, f"http://127.0.0.1:{server.port}", "secret"), server.port


@pytest.mark.parametrize(
    ("limit", "code", "status"),
    [("max_sessions_per_key", "too_many_sessions", 429), ("max_connections", "too_many_connections", 503)],
)
async def test_a_limit_of_connections_is_named(limit, code, status):
    (count, *error, message), _ = await refused(partial(in_node, REFUSALS), **{limit: 1})
    assert (count, error) == (1, [code, status, 1])
    assert message.startswith("the server refuses the connection: ") and f"(HTTP status {status})" in message


async def test_an_origin_that_is_not_allowed_is_named(tmp_path):
    browser = required_browser()
    with served_page() as page:
        (count, code, status, _, message), port = await refused(partial(page.run, browser, tmp_path, REFUSALS))
    assert (count, code, status) == (0, "connection_lost", None)
    assert message.startswith(f"127.0.0.1:{port} refuses the connection: it does not allow pages of {page.origin} (")


async def test_an_answer_gets_the_deltas_of_its_own_response():
    assert await trio.to_thread.run_sync(in_node, STRANGE) == {
        "texts": ["mine", "more"],
        "result": {"text": "minemore", "tool_calls": [], "status": "completed", "usage": None, "droppedTurns": 0},
        "history": [user("hello"), assistant("minemore")],
        "refused": ["too_bad", []],
    }


def test_mistakes_in_the_arguments_are_named():
    form = "url must be like ws://localhost:8000, got"
    options = "apiKey, model, history, keepPartial, onState, onLoss, WebSocket"
    assert in_node(MISUSE) == [
        "Session has no option apikey; its options are " + options,
        f"{form} 127.0.0.1:8000",
        f"{form} localhost:8000",
        f"{form} undefined",
        "history must be an array of messages",
        "generate has no option keep_partial; its options are keepPartial, media",
        "conversation.item.create",  # and not that there is nothing to respond to
    ]


class KilledServer:
    """A server at one port, which is killed and started again."""

    def __init__(self, nursery):
        self.nursery = nursery
        self.port = 0

    async def start(self):
        self.scope, self.killed = trio.CancelScope(), trio.Event()
        self.server = await self.nursery.start(self._serve)
        self.port = self.server.port

    async def kill(self):
        self.scope.cancel()
        await self.killed.wait()

    async def _serve(self, task_status):
        with self.scope:
            async with on_loopback(port=self.port) as server:
                task_status.started(server)
                await trio.sleep_forever()
        self.killed.set()


async def last_words(program, url, servant):
    """What a program in node says last; its orders are methods of the servant."""
    command = [*required_node(), str(program), url]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    async with process.stdin, process.stdout:
        received = b""
        with trio.fail_after(60):
            while data := await process.stdout.receive_some():
                *lines, received = (received + data).split(b"\n")
                for event in map(json.loads, lines):
                    if "order" in event:
                        await getattr(servant, event["order"])()
                        await process.stdin.send_all(b"\n")
    await process.wait()
    return event


class Room:
    """The bytes of a server: all of them are taken, or given back."""

    def __init__(self, held):
        self.held = held

    async def take(self):
        self.held.charge(100_000)

    async def give(self):
        self.held.give_back(100_000)


async def test_what_was_dropped_for_want_of_room_is_taken_back():
    """The connection is closed with 1013; the next question opens another one, which gets the conversation."""
    async with on_loopback(max_buffered_bytes=100_000) as server:
        with server.budget.holding(None) as held:
            url = f"http://127.0.0.1:{server.port}"
            event = await last_words(ROOM, url, Room(held))
        results = event["results"]
        expected, history = partial(reference, SimpleNamespace(engine=server.engine)), []
        for question, answer in zip(["hello", *["and now?"] * 4], results["answers"], strict=True):
            history.append(user(question))
            assert answer == expected(history)
            history.append(assistant(answer))
        dropped = "the server had no room for a message (close code 1013: no room for a message: buffers_full)"
        assert results["refusals"] == [["connection_lost", 1013, 1, dropped]] * 4
        assert (results["losses"], results["count"], results["history"]) == ([1013] * 4, 5, history)


async def test_a_conversation_outlives_its_connections():
    """The server is killed during an answer, during one that is kept, and between two; then it starts again."""
    async with trio.open_nursery() as nursery:
        killed = KilledServer(nursery)
        await killed.start()
        event = await last_words(LOSSES, f"http://127.0.0.1:{killed.port}", killed)
        check_losses(event, partial(reference, SimpleNamespace(engine=killed.server.engine)), killed.port)
        await killed.kill()


def check_losses(event, expected, port):
    results = event["results"]
    history = [{"role": "system", "content": "be brief"}, user("a note"), user("hello")]
    history += [assistant(expected(history)), user("what now?")]
    history += [assistant(expected(history)), user("kept"), assistant(results.pop("kept"))]
    history += [user("beside"), user("one")]
    after_kept = expected(history)
    broken = "the connection broke off: the server died, or the network failed (close code 1006)"
    assert event["areDifferent"]
    assert results == {
        "loss": ["connection_lost", 1006, broken],
        "refusal": ["connection_lost", None, f"no server answers at 127.0.0.1:{port}"],
        "after": history[5]["content"],
        "afterKept": after_kept,
        "history": [*history, assistant(after_kept)],
        "losses": ["connection_lost"] * 3,
        "closed": ["session_ended", None, "the session was closed"],
    }


def check_results(results, expected, unused_address):
    error = "TrioengineError"
    first = expected([user("hello")])
    second = expected([user("hello"), assistant(first), user("and then?")])
    assert results.pop("id").startswith("sess_")
    assert results.pop("second")["text"] == second
    assert len(results.pop("cancelledText")) > 0
    kept = results.pop("kept")
    assert len(kept) > 0
    four = expected([user("four")])
    history = [user("four"), assistant(four), user("what now?")]
    history += [assistant(expected(history)), user("keep"), assistant(kept), user("what was that?")]
    history += [assistant(expected(history))]
    assert results.pop("historyOfAll") == history
    *cancelled, (text, status) = results.pop("rapid")
    assert cancelled == [["", "cancelled"]] * 3
    assert text == four and status in ("completed", "incomplete")
    check_dropped(results.pop("dropped"), expected)
    assert results.pop("droppedAfter") == 9
    refused = "the server refuses the connection: "
    assert results == {
        "first": [first, first, "completed"],
        "history": [user("hello"), assistant(first), user("and then?"), assistant(second)],
        "busy": [error, "session_busy", None],
        "badRequest": [error, "invalid_value", "response.temperature"],
        "badSettings": [error, "missing_parameter", "response.tools[0].name"],
        "aside": [error, "unsupported_parameter", "conversation"],
        "tooLong": [error, "context_length_exceeded", "prompt"],
        "badText": [error, "invalid_type", "item.content[0].text"],
        "badItem": [error, "invalid_value", "item.role"],
        "badSetting": [error, "invalid_value", "session.temperature"],
        "undropped": [error, "context_length_exceeded", "prompt"],
        "afterRefusals": history[3]["content"],
        "afterKept": history[7]["content"],
        "settings": "be",
        "afterClose": [error, "session_ended", None],
        "sayAfterClose": [error, "session_ended", None],
        "many": 200,
        "closed": [[error, "session_ended", None]] * 2,
        "asleep": [error, "asleep", None],
        "paused": first,
        "states": ["sleeping", "awake"],
        "wrongKey": ["invalid_api_key", 401, f"{refused}this key is not accepted (HTTP status 401)"],
        "noKey": [
            "invalid_api_key",
            401,
            f"{refused}this needs a key: the option apiKey (HTTP status 401)",
        ],
        "oddKey": ["invalid_api_key", None, "apiKey has characters that the handshake of a WebSocket cannot carry"],
        "broken": ["connection_lost", None, "cannot open a WebSocket: not here"],
        "wrongModel": ["model_not_found", 404, "model 'other' not found; this server serves 'toy'"],
        "unreachable": ["connection_lost", None, f"no server answers at {unused_address}"],
        "later": ["connection_lost", None, f"no server answers at {unused_address}"],
    }


def check_dropped(results, expected):
    """Each history is the one before without its dropped turns, and with the answer to that."""
    before = [{"role": "system", "content": "be kind"}]
    for count, after in results:
        before[1 : 1 + 2 * count] = []
        assert after[:-2] == before
        assert after[-1] == assistant(expected(after[:-1], 20))
        before = after
    assert [count for count, _ in results] == [0, 0, 0, 0, 1, 1, 1, 1]
