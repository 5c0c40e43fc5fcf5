"""Compare the CPU time of the servers of two source trees for an output token, under the same loads in turn.

`python tests/serve/cpu_times.py TREE OTHER_TREE ROUNDS [options of bench serve]` prints a line for each round, and the
medians. Both servers run the default model on this machine, with 64 sequences at most. Each round has its own seed, so
that no prompt is in a prefix cache. The first round is not counted.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-P", "-m", "trioengine")
SERVE = ("--max-num-seqs", "64", "--max-model-len", "2048", "--log-level", "warning")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def serving(tree):
    """Yield the URL of a server of this tree."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
    process = subprocess.Popen([*COMMAND, "serve", "--port", str(port), *SERVE], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        ready = ("curl", "-sf", "--retry", "60", "--retry-delay", "1", "--retry-connrefused", f"{url}/ready")
        subprocess.run(ready, stdout=subprocess.DEVNULL, check=True)
        yield url
    finally:
        process.terminate()
        process.wait()


def measure(url, options):
    """Return microseconds for an output token, and the output tokens a second."""
    command = [*COMMAND, "bench", "serve", "--base-url", url, "--ignore-eos", "--json", *options]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return report["server_cpu_seconds"] / report["total_output_tokens"] * 1e6, report["output_throughput"]


def main(trees, rounds, options):
    with ExitStack() as servers:
        urls = [servers.enter_context(serving(tree)) for tree in trees]
        results = []
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            times = {i: measure(urls[i], [*options, "--seed", str(number)]) for i in order}
            results.append([times[0], times[1]])
            shown = [f"{time:.1f} us, {rate:.0f} tokens/s" for time, rate in results[-1]]
            print(number, *shown, f"ratio {times[1][0] / times[0][0]:.3f}", sep="  ", flush=True)
    counted = results[1:]
    medians = [statistics.median(each[i][0] for each in counted) for i in (0, 1)]
    ratio = statistics.median(each[1][0] / each[0][0] for each in counted)
    print("medians", *(f"{time:.1f} us" for time in medians), f"ratio {ratio:.3f}", sep="  ")


if __name__ == "__main__":
    main(sys.argv[1:3], int(sys.argv[3]), sys.argv[4:])
