"""Compare two servers under the same loads in turn.

`python tests/serve/server_rounds.py SERVER OTHER ROUNDS [options of bench serve]`, with the root and tests in
PYTHONPATH.

A server is a source tree of this project, which serves the default model with 64 sequences at most, or a command
without a shell, in which {port} is replaced. It has to export `process_cpu_seconds_total`. The process group of each
server is stopped while the other one is measured. Each round prints the output tokens a second, the mean time to the
first token and the CPU time of the server's process for an output token, of both servers, and the second one's divided
by the first one's; then come the medians of all these figures. Each round has its own seed, so that only the chat
template of a prompt is in a prefix cache. The first round is not counted.
"""

import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from urllib.error import HTTPError

from helpers.stopped_processes import StoppedProcess, end_on_sigterm

COMMAND = (sys.executable, "-P", "-m", "trioengine")
SERVE = "serve --max-num-seqs 64 --max-model-len 2048 --log-level warning --port {port}"
START_TIMEOUT, PROBE_TIMEOUT = 300.0, 5.0  # seconds


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server(StoppedProcess):
    def __init__(self, text):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command, environment = shlex.split(text), dict(os.environ)
        if "{port}" not in text:
            command = [*COMMAND, *shlex.split(SERVE)]
            environment["PYTHONPATH"] = str(Path(text).resolve(strict=True))
        super().__init__([word.replace("{port}", str(port)) for word in command], env=environment, stdout=sys.stderr)

    def wait_until_ready(self):
        self.resume()
        deadline = monotonic() + START_TIMEOUT
        while not self.is_ready():
            if self.process.poll() is not None or monotonic() >= deadline:
                raise SystemExit(f"{self.process.args} does not serve")
            sleep(0.5)
        self.stop()

    def is_ready(self):
        try:
            urllib.request.urlopen(f"{self.url}/ready", timeout=PROBE_TIMEOUT).close()
        except HTTPError as error:
            return error.code == 404  # other servers have no such path, and listen when they are ready
        except (OSError, http.client.HTTPException):
            return False
        return True

    def measure(self, options):
        """Return output tokens a second, mean milliseconds to the first token, and CPU microseconds of a token."""
        self.resume()
        command = [*COMMAND, "bench", "serve", "--base-url", self.url, "--ignore-eos", "--json", *options]
        report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        self.stop()
        cpu = report["server_cpu_seconds"] / report["total_output_tokens"] * 1e6
        return report["output_throughput"], report["mean_ttft_ms"], cpu


def show(name, figures, ratios):
    texts = [f"{rate:.0f} tokens/s, {ttft:.0f} ms, {cpu:.1f} us" for rate, ttft, cpu in figures]
    print(name, *texts, "ratios " + ", ".join(f"{ratio:.3f}" for ratio in ratios), sep="  ", flush=True)


def main(texts, rounds, options):
    end_on_sigterm()
    results = []
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(text)) for text in texts]
        for server in servers:
            server.wait_until_ready()
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
