"""The order in which `trioengine serve` starts: the worker does not wait for modules that it does not need."""

import subprocess
import sys

import pytest

# `trioengine serve` up to the start of its worker; the names of the modules that are there by then go to stdout
UNTIL_THE_WORKER = """
import math, os, sys

def end(event, arguments):
    if event == "subprocess.Popen" and "trioengine.worker" in arguments[1]:
        print(*sys.modules, flush=True)
        os._exit(0)

sys.addaudithook(end)
from trioengine.cli.app import run
from trioengine.serve import startup

startup.HEAD_START = math.inf  # the engine gets as long as it takes on a busy machine
run(["serve", "--port", "0", *sys.argv[1:]])
"""
OF_THE_SERVER = {
    "trioengine.serve.server",
    "trioengine.serve.connection",
    "trioengine.serve.requests",
    "trioengine.serve.realtime",
    "trioengine.serve.metrics",
    "trioengine.serve.pages",
    "trioengine.serve.tls",
}
LIBRARIES = {"msgspec", "prometheus_client", "trio_websocket", "wsproto", "h11", "rich", "PIL", "llguidance", "torch"}


@pytest.mark.parametrize("options", [[], ["--log-json"]])
def test_a_worker_is_started_before_the_modules_of_the_server_are_imported(smollm2, options):
    command = [sys.executable, "-c", UNTIL_THE_WORKER, str(smollm2), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ended.stdout.split())
    assert "trioengine.actors.supervisor" in loaded
    assert loaded & (OF_THE_SERVER | LIBRARIES) == set()
