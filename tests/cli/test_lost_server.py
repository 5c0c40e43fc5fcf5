"""A chat whose server is killed."""

import socket
import subprocess
import sys
from contextlib import contextmanager

from helpers.terminal_chats import CTRL_C, PATIENCE, PROMPT, ask, on_a_terminal

SERVER = """
import sys
from functools import partial

import trio

from trioengine import EngineConfig
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour

async def main():
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, behaviours=[Behaviour(load_time=0, step_time=0.02)])
        config = ServeConfig(port=int(sys.argv[1]))
        server = await nursery.start(partial(serve, EngineConfig(model="toy"), config, ports=simulation.ports))
        print(server.port, flush=True)

trio.run(main)
"""


@contextmanager
def server(port=0):
    """A server that is a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_chat_of_a_pipe_ends_with_its_server():
    """Its reader could not tell an answer that is begun again from a whole one."""
    with server() as (process, port):
        options = ("--ignore-eos", "--temperature", "0", "--max-tokens", "400")
        command = [sys.executable, "-m", "trioengine", "chat", "--connect", f"http://127.0.0.1:{port}", *options]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes) as chat:
            chat.stdin.write(b"hello\nagain\n")
            chat.stdin.flush()
            assert chat.stdout.read(1)
            process.kill()
            said, complaints = chat.communicate(timeout=PATIENCE)
    assert (b"\n" in said, chat.returncode) == (False, 1)
    assert complaints.startswith(b"trioengine: error: the connection to the server broke off")


def test_a_chat_goes_on_with_its_conversation_after_the_server_was_killed():
    lost = b"\r\ntrioengine: error: the connection to the server broke off: the server died, or the network failed"
    kept = b"(Enter sends the message again, over a new connection; the conversation is kept)\r\n> hello"
    with server() as (process, port):
        options = ("--ignore-eos", "--temperature", "0", "--max-tokens", "200")
        address = f"http://127.0.0.1:{port}"
        with on_a_terminal("-m", "trioengine", "chat", "--connect", address, *options, columns=200) as user:
            user.until(PROMPT)
            ask(user, b"hello")
            process.kill()
            process.wait()  # its sockets are closed, also the listening one
            user.until(lost)
            user.until(kept)
            user.type(b" again\\\r")
            user.until("… ".encode())
            user.type(b"and now?\r")
            user.until(b"connection refused")
            user.until(kept + b" again\\")
            with server(port):
                user.type(b"\r")
                user.until("… and now?".encode())
                ask(user, b"")
                user.type(CTRL_C)
                user.until(b"\n(stopped)\r\n")  # the new server may become awake meanwhile, which is reported
                user.until(b"> ")
                user.leave()


def test_ctrl_c_stops_connecting_again_and_keeps_the_chat():
    with server() as (process, port):
        with on_a_terminal("-m", "trioengine", "chat", "--connect", f"http://127.0.0.1:{port}", columns=200) as user:
            user.until(PROMPT)
            ask(user, b"hello")
            process.kill()
            process.wait()
            user.until(b"the conversation is kept)\r\n> ")
            with socket.create_server(("127.0.0.1", port)) as silent:
                user.type(b"again\r")
                connection, _ = silent.accept()
                with connection:
                    user.type(CTRL_C)
                    user.until(b"(stopped)\r\n> ")
            user.leave()
