"""Compare two servers under the same loads in turn.

`python tests/serve/server_rounds.py SERVER OTHER ROUNDS [options of bench serve]`

A server is a source tree of this project, which serves the default model with 64 sequences at most, or else a command
with {port} in it. Prints for each round, and as medians, the output tokens a second, the mean time to the first token,
the CPU time of the server's process for an output token, and the ratios of the second server's to the first one's. Each
server is stopped while the other one is measured. Each round has its own seed, so that a prefix cache has no more of a
prompt than the chat template. The first round is not counted.
"""

import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from urllib.error import HTTPError

COMMAND = (sys.executable, "-P", "-m", "trioengine")
SERVE = "serve --max-num-seqs 64 --max-model-len 2048 --log-level warning --port {port}"
START_TIMEOUT = 300.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """A server's process group, stopped unless it is measured."""

    def __init__(self, text):
        port = free_port()
        is_tree = Path(text).is_dir()
        command = [*COMMAND, *shlex.split(SERVE)] if is_tree else shlex.split(text)
        environment = {**os.environ, "PYTHONPATH": str(Path(text).resolve())} if is_tree else os.environ
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self):
        deadline = monotonic() + START_TIMEOUT
        while self.process.poll() is None and monotonic() < deadline:
            if self.is_ready():
                self.signal(signal.SIGSTOP)
                return self
            sleep(0.5)
        self.__exit__()
        raise SystemExit(f"{self.process.args} does not serve")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait()

    def is_ready(self):
        try:
            urllib.request.urlopen(f"{self.url}/ready").close()
        except HTTPError as error:
            return error.code == 404  # other servers have no such path, and listen when they are ready
        except OSError:
            return False
        return True

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def measure(self, options):
        """Return output tokens a second, mean milliseconds to the first token, and CPU microseconds of a token."""
        self.signal(signal.SIGCONT)
        command = [*COMMAND, "bench", "serve", "--base-url", self.url, "--ignore-eos", "--json", *options]
        report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        self.signal(signal.SIGSTOP)
        cpu = report["server_cpu_seconds"] / report["total_output_tokens"] * 1e6
        return report["output_throughput"], report["mean_ttft_ms"], cpu


def show(name, figures, ratios):
    texts = [f"{rate:.0f} tokens/s, {ttft:.0f} ms, {cpu:.1f} us" for rate, ttft, cpu in figures]
    print(name, *texts, "ratios " + ", ".join(f"{ratio:.3f}" for ratio in ratios), sep="  ", flush=True)


def main(texts, rounds, options):
    results = []
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(text)) for text in texts]
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            figures = {i: servers[i].measure([*options, "--seed", str(number)]) for i in order}
            ratios = [other / one for one, other in zip(figures[0], figures[1], strict=True)]
            show(number, (figures[0], figures[1]), ratios)
            results.append((figures[0], figures[1], ratios))
    one, other, ratios = (map(statistics.median, zip(*part, strict=True)) for part in zip(*results[1:], strict=True))
    show("medians", (one, other), ratios)


if __name__ == "__main__":
    main(sys.argv[1:3], int(sys.argv[3]), sys.argv[4:])
