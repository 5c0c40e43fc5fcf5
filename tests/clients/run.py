"""Run programs of OpenAI-compatible clients against a real server, and print a line for each client.

Usage: python tests/clients/run.py [--client NAME]... [--folder DIR] [--shared-packages DIR]

The clients and their pinned versions are in catalog.py. Each has an environment of its own, which is installed from
PyPI or npm once, and kept. `trioengine serve` runs with the default model on a free loopback port; with TLS for clients
that need it. After each program the server's books have to balance. Exit code 1 if a client failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from catalog import CLIENTS
from environments import Environments, without_python_variables
from serving import MODEL, Certificate, served, write_tokenizer

from trioengine.hub.known_models import trioengine_home

PROGRAM_TIMEOUT = 600.0  # seconds
CERTIFICATES = ("trustme==1.2.1",)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "no_proxy": "127.0.0.1,localhost",
}


class Outcome(NamedTuple):
    """The checks of a program that passed, and a reason for each that failed."""

    passed: list[str]
    failed: list[str]


class Runner:
    """Runs programs, each against the server that it needs; servers are started when the first program needs them."""

    def __init__(self, environments, scratch, exits):
        self._environments = environments
        self._scratch = scratch
        self._exits = exits
        self._servers = {}
        self._tokenizer = scratch / "tokenizer"
        write_tokenizer(self._tokenizer)

    def outcome(self, client):
        """Install the client, run its program, and compare the server's books afterwards."""
        try:
            command = self._environments.command(client)
            server = self._server(client.tls)
            outcome = self._run(client, command, server)
            server.check_invariants()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            return Outcome([], [" ".join(str(error).split())])
        return outcome

    def _server(self, tls):
        if tls not in self._servers:
            log = self._scratch / ("server-tls.log" if tls else "server.log")
            self._servers[tls] = self._exits.enter_context(served(log, self._certificate() if tls else None))
        return self._servers[tls]

    def _certificate(self):
        python = self._environments.python("certificates", CERTIFICATES)
        return Certificate.made(python, self._scratch)

    def _run(self, client, command, server):
        folder = self._scratch / client.name
        folder.mkdir()
        variables = without_python_variables() | OFFLINE
        variables |= {"BASE_URL": server.url, "MODEL": MODEL, "TOKENIZER": str(self._tokenizer), "FOLDER": str(folder)}
        variables |= {"HF_HOME": str(folder / "hub"), "XDG_CACHE_HOME": str(folder / "cache")}
        if server.authority is not None:
            variables["NODE_EXTRA_CA_CERTS"] = str(server.authority)
        done = completed(command, folder, variables)
        (folder / "output.log").write_text(done.stdout + done.stderr)
        lines = [line.partition(" ") for line in done.stdout.splitlines()]
        passed = [rest for verdict, _, rest in lines if verdict == "ok"]
        failed = [rest for verdict, _, rest in lines if verdict == "failed"]
        if done.returncode != 0 and not failed:
            failed = [f"exit code {done.returncode}: {' '.join(done.stderr.split())[-400:]}"]
        return Outcome(passed, failed or ([] if passed else ["the program made no check"]))


def completed(command, folder, variables):
    """Run a program to its end; a timeout or an interrupt ends it with the processes that it started."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=variables, text=True, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=PROGRAM_TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def line_of(client, outcome):
    """The line of a client: its name and version, the checks that failed with their reasons, and those that passed."""
    verdict = "failed" if outcome.failed else "ok"
    reasons = "; ".join(outcome.failed)
    passed = ", ".join(outcome.passed)
    details = f"{reasons}; passed: {passed or 'none'}" if outcome.failed else passed
    return f"{client.name} {client.shown_version} {verdict}: {details}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", action="append", choices=CLIENTS, metavar="NAME")
    parser.add_argument(
        "--folder", type=Path, default=trioengine_home() / "clients", help="where environments are kept"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="an empty folder for the logs, which are else lost")
    parser.add_argument(
        "--shared-packages", type=Path, metavar="DIR", help="site-packages that virtual environments see as well"
    )
    given = parser.parse_args(arguments)
    environments = Environments(given.folder.absolute(), given.shared_packages)
    failed = 0
    with ExitStack() as exits:
        scratch = given.logs or Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="trioengine-clients-")))
        runner = Runner(environments, scratch.absolute(), exits)
        for client in [CLIENTS[name] for name in given.client or CLIENTS]:
            outcome = runner.outcome(client)
            failed += bool(outcome.failed)
            print(line_of(client, outcome), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
