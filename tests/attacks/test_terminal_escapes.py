"""A model or a server that writes escape sequences: a terminal shows them and does not obey them."""

import json
import os
import pty
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import trio
from websockets.sync.server import serve

from trioengine.cli.app import run
from trioengine.cli.generate import write_answer
from trioengine.cli.tty import json_line
from trioengine.core.types import Chunk, Completion, FinishReason, Usage

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202e\u2067\rred\n"
HARMLESS = r"\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202e\u2067red"


class HostileServer:
    """Speaks Realtime, with escape sequences in every text that it chooses."""

    def __call__(self, websocket):
        self._say(websocket, "session.created", session={"id": "sess_1", "model": EVIL})
        for message in websocket:
            if json.loads(message)["type"] == "response.create":
                self._say(websocket, "engine.state", state=EVIL)
                self._say(websocket, "response.created", response={"id": "resp_1"})
                self._say(websocket, "response.output_item.added", item={"id": "item_1"})
                self._say(websocket, "response.output_text.delta", item_id="item_1", delta=EVIL)
                self._say(websocket, "response.done", response={"status": "completed", "output": []})

    def _say(self, websocket, name, **fields):
        websocket.send(json.dumps({"type": name, **fields}))


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()


def shown_on_a_terminal(arguments, stdin):
    """Everything that a command writes to its terminal."""
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "trioengine", *arguments],
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"TERM": "dumb"},
    ) as process:
        os.close(terminal)
        process.stdin.write(stdin)
        process.stdin.close()
        shown = b""
        try:
            while received := os.read(master, 4096):
                shown += received
        except OSError:  # the process has ended
            pass
    os.close(master)
    return shown.decode().replace("\r\n", "\n")


def test_a_chat_with_a_hostile_server():
    with running(serve(HostileServer(), "127.0.0.1", 0)) as server:
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        shown = shown_on_a_terminal(["chat", "--connect", url], b"hello\n")
    assert shown.count(HARMLESS) == 2  # the state and the answer
    assert not set(shown) & {"\x1b", "\x07", "\x08", "\r", "\x9b", "\u202e", "\u2067"}


class HostileHttp(BaseHTTPRequestHandler):
    """Refuses everything, with escape sequences."""

    def do_GET(self):
        body = json.dumps({"error": {"type": "x", "code": "x", "message": EVIL, "param": None}}).encode()
        self.send_response(400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_an_error_of_a_hostile_server(capsys):
    with HTTPServer(("127.0.0.1", 0), HostileHttp) as http, running(http):
        assert run(["status", "--connect", f"http://127.0.0.1:{http.server_port}"]) != 0
    error = capsys.readouterr().err
    assert HARMLESS.partition("red")[0] in error
    assert "\x1b" not in error


class Said:
    """A generation with one chunk."""

    completion = Completion(1, EVIL, (), None, FinishReason.STOP, None, Usage(1, 1, 0))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def __aiter__(self):
        yield Chunk(EVIL, ())


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, f"{HARMLESS}\n\n"), (False, f"{EVIL}\n")])
def test_an_answer_on_a_terminal_and_in_a_pipe(monkeypatch, capsys, is_terminal, expected):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    trio.run(write_answer, Said())
    assert capsys.readouterr().out == expected


def test_json_escapes_them():
    line = json_line({"text": EVIL + "é\x7f\ud800"})
    assert json.loads(line) == {"text": EVIL + "é\x7f\ud800"}
    assert line.removesuffix("\n").isprintable()
    assert "é" in line
