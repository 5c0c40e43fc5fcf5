"""Signals to a server that is a process of its own, on a simulated worker; for the third see tests/serve."""

import json
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
from trio_websocket import ConnectionClosed, wrap_client_stream

PATIENCE = 120  # seconds until a process that should have ended is a failure
SERVER = """
import sys
from contextlib import nullcontext
from functools import partial

import trio

from trioengine import EngineConfig
from trioengine.cli.logs import configure_logs
from trioengine.cli.serve import _serve
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour

async def main():
    async with trio.open_nursery() as nursery:
        behaviour = Behaviour(load_time=0, step_time=0.01)
        simulation = Simulation(nursery, behaviours=[behaviour])
        config = EngineConfig(model="toy", max_num_seqs=8)
        await _serve(partial(serve, config, ServeConfig(port=0), ports=simulation.ports), 1000.0, nullcontext())
        nursery.cancel_scope.cancel()

configure_logs("info", as_json=True)
trio.run(main)
"""


SIGNALLED = """
import os, signal
from trioengine.serve import startup

imported = startup._import_server

def signalled():
    os.kill(os.getpid(), signal.SIGTERM)
    return imported()

startup._import_server = signalled
"""


class Served:
    """A serving process; `log` has the lines of its log that were read so far."""

    def __init__(self, process):
        self.process = process
        self.log = []
        self.port = self._port()

    def _port(self):
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if match := re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)", self.log[-1]["message"]):
                return int(match.group(1))
        raise AssertionError(self.log)

    def end(self):
        """Its exit code; the rest of its log was read."""
        code = self.process.wait(PATIENCE)
        self.log += map(json.loads, self.process.stderr)
        return code

    @property
    def messages(self):
        return [record["message"] for record in self.log]


def test_a_signal_before_the_server_has_started():
    """The worker is there, and the modules of the server are being imported."""
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED + SERVER], capture_output=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 0, ended.stderr
    messages = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert messages[-1] == "stopped" and any(message.startswith("SIGTERM: ") for message in messages)


@contextmanager
def served():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stderr=subprocess.PIPE, text=True)
    try:
        yield Served(process)
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def answering(port, max_output_tokens):
    """A function that gives the next event of a type, in the middle of an answer of so many tokens."""
    with trio.fail_after(PATIENCE):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:
            websocket = await wrap_client_stream(nursery, stream, "127.0.0.1", "/v1/realtime")

            async def until(name):
                while (event := json.loads(await websocket.get_message()))["type"] != name:
                    pass
                return event

            content = [{"type": "input_text", "text": "hello"}]
            item = {"type": "message", "role": "user", "content": content}
            options = {"temperature": 0, "max_output_tokens": max_output_tokens, "ignore_eos": True}
            await websocket.send_message(json.dumps({"type": "conversation.item.create", "item": item}))
            await websocket.send_message(json.dumps({"type": "response.create", "response": options}))
            await until("response.output_text.delta")
            yield until
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_an_answer_end(first):
    with served() as server:

        async def client():
            async with answering(server.port, 100) as until:
                server.process.send_signal(first)
                response = (await until("response.done"))["response"]
                assert response["usage"]["output_tokens"] == 100
                with pytest.raises(ConnectionClosed) as closed:
                    await until("nothing")
                assert closed.value.reason.code == 1001

        trio.run(client)
        assert server.end() == 0
        assert (
            f"{first.name}: finishing the requests in flight, for at most 1000 s; a second signal aborts them"
            in server.messages
        )
        assert server.messages[-1] == "stopped"
        (access,) = (record for record in server.log if record["logger"] == "trioengine.access")
        assert (access["path"], access["status"], access["session"][:5]) == ("/v1/realtime", 101, "sess_")
        assert access["client"].startswith("127.0.0.1:")


def test_the_second_signal_aborts_it():
    with served() as server:

        async def client():
            async with answering(server.port, 450) as until:
                server.process.send_signal(signal.SIGTERM)
                await until("response.output_text.delta")
                server.process.send_signal(signal.SIGTERM)
                response = (await until("response.done"))["response"]
                assert response["status_details"]["error"]["code"] == "shutdown"

        trio.run(client)
        assert server.end() == 0
        assert server.messages[-1] == "stopped"
        assert "SIGTERM: aborting" in server.messages
        assert not any("exception" in record for record in server.log)
