"""A relay in the pipes between an engine and its worker. It passes the bytes on in drawn portions, with pauses.

`python relay.py serve MODEL …` is `trioengine serve`, but each worker is started by this file, and the server dies when
its standard input ends. The file that the variable FUZZ_PIPES names has one of WAYS, which may change at any time.

As a worker's command, the process becomes the worker, so that the engine and the worker see their own processes. A
child, in the worker's process group, is the relay. It imports the standard library alone.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

WAYS = {  # bytes of a portion, and seconds after it
    "fast": (1 << 16, 0.0),
    "bytes": (1, 0.0),
    "slow": (64, 0.005),
    "lumps": (1 << 16, 0.2),
}
PIPES = "FUZZ_PIPES"
PIPE_SIZE = 4096  # bytes, the least that Linux has: a writer waits early


def serve() -> None:
    """Run the command in `sys.argv`, with workers behind relays, until it ends or standard input does."""
    from trioengine.actors import ports

    ports.WORKER = (str(Path(__file__).resolve()),)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    runpy.run_module("trioengine", run_name="__main__", alter_sys=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def become_worker(arguments: list[str]) -> None:
    """Put a relay between the descriptors of `--in` and `--out`, and execute the worker."""
    positions = {name: arguments.index(f"--{name}") + 1 for name in ("in", "out", "payloads")}
    engine_in, engine_out, payloads = (int(arguments[at]) for at in positions.values())
    worker_in, relay_out = _pipe()
    relay_in, worker_out = _pipe()
    if os.fork() == 0:
        for fd in (worker_in, worker_out, payloads):
            os.close(fd)
        _relay((engine_in, relay_out), (relay_in, engine_out))
    for fd in (engine_in, engine_out, relay_in, relay_out):
        os.close(fd)
    for name, fd in (("in", worker_in), ("out", worker_out)):
        os.set_inheritable(fd, True)
        arguments[positions[name]] = str(fd)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "trioengine.worker", *arguments])


def _pipe() -> tuple[int, int]:
    fds = os.pipe()
    fcntl.fcntl(fds[1], fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return fds


def _relay(to_worker: tuple[int, int], to_engine: tuple[int, int]) -> None:
    """Pass bytes in both directions until the worker's end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_pass_on, args=to_worker, daemon=True).start()
    _pass_on(*to_engine)
    os._exit(0)


def _pass_on(source: int, sink: int) -> None:
    """Pass bytes on until one end is closed, then close both, as the ends of one pipe would be."""
    settings = Path(os.environ[PIPES])
    try:
        while True:
            size, pause = WAYS[settings.read_text()]
            portion = memoryview(os.read(source, size))
            if not portion:
                break
            while portion:
                portion = portion[os.write(sink, portion) :]
            time.sleep(pause)
    except BrokenPipeError:
        pass  # the reader has died
    finally:
        os.close(source)
        os.close(sink)


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        become_worker(sys.argv[1:])
    else:
        serve()
