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
from browser import find_browser, served_page
from loopback import on_loopback
from realtime_texts import assistant, reference, user

PROGRAM = Path(__file__).with_name("javascript_client.mjs")


def node_with_websocket():
    """How to start node so that it has a WebSocket; None without such a node."""
    node = shutil.which("node")
    for options in ([], ["--experimental-websocket"]) if node is not None else ():
        check = [node, *options, "-e", "process.exit(globalThis.WebSocket ? 0 : 1)"]
        if subprocess.run(check, capture_output=True).returncode == 0:
            return [node, *options]
    return None


async def check(run, **options):
    """Run the program, by a function of a server's URL and of one where nobody listens, and look at its results."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"ws://127.0.0.1:{unused.getsockname()[1]}"
    async with on_loopback(api_key=("secret",), admin_key=("admin",), **options) as server:
        results = await trio.to_thread.run_sync(run, f"http://127.0.0.1:{server.port}", nobody)
        assert isinstance(results, dict), results
        expected = partial(reference, SimpleNamespace(engine=server.engine))
        first = expected([user("hello")])
        check_results(results, first, expected([user("hello"), assistant(first), user("and then?")]))


async def test_in_node():
    command = node_with_websocket()
    if command is None:
        pytest.skip("there is no node with a WebSocket")

    def run(*urls):
        program = f"import {{ run }} from '{PROGRAM}'; console.log(JSON.stringify(await run(...{json.dumps(urls)})));"
        arguments = [*command, "--input-type=module", "-e", program]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    await check(run)


async def test_in_a_browser(tmp_path):
    browser = find_browser()
    if browser is None:
        pytest.skip("there is no Chromium")
    with served_page() as page:
        await check(partial(page.run, browser, tmp_path, PROGRAM), allowed_origin=(page.origin,))


def check_results(results, first, second):
    rejected = ["TrioengineError", "invalid_value"]
    lost = ["TrioengineError", "connection_lost"]
    assert results.pop("id").startswith("sess_")
    assert len(results.pop("partial")) > 0
    assert results.pop("second")["text"] == second
    assert results.pop("afterCancel") in ("completed", "incomplete")
    assert results == {
        "first": [first, first, "completed"],
        "busy": ["TrioengineError", "session_busy", None],
        "settings": "be",
        "badSetting": [*rejected, "session.temperature"],
        "badRequest": [*rejected, "response.temperature"],
        "badItem": [*rejected, "item.role"],
        "tooLong": ["TrioengineError", "context_length_exceeded", "prompt"],
        "afterClose": [*lost, None],
        "sayAfterClose": [*lost, None],
        "many": 200,
        "asleep": ["TrioengineError", "asleep", None],
        "kept": first,
        "states": ["sleeping", "awake"],
        "lost": [*lost, None],
        "wrongKey": lost,
        "nobody": lost,
    }
