"""A server whose worker is a child: a process that starts a FaultyServer in a child, and another one when that dies.

Prints its port. With the argument `once` it has the bug that a worker that dies is not replaced.
"""

import os
import signal
import socket
import sys

import trio

from helpers.faulty_servers import FaultyServer


async def work(listening):
    await trio.serve_listeners(FaultyServer().accept, [trio.SocketListener(trio.socket.from_stdlib_socket(listening))])


def start_worker(listening):
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trio.run(work, listening)
    return child


def main(*, once):
    listening = socket.create_server(("127.0.0.1", 0))
    signal.signal(signal.SIGTERM, lambda *args: sys.exit())
    child = start_worker(listening)
    try:
        print(listening.getsockname()[1], flush=True)
        while True:
            os.waitpid(child, 0)
            child = None if once else start_worker(listening)
            if once:
                signal.pause()
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(once="once" in sys.argv)
