"""schemathesis makes requests from /openapi.json: each gets a response that the document promises, and no 5xx.

Each bound and each option of a field is tried, the same in each run; `--slow` adds random requests of one seed. The
routes that put the engine to sleep have a server of their own.
"""

import os
import re
import sys
from dataclasses import replace

import pytest
import trio
from helpers.described import described_path
from helpers.loopback import on_loopback

from trioengine.testing.simulation import DEFAULT_LIMITS

POWER = "(sleep|wake)"
KEYS = {"api_key": "user-key-of-this-test", "admin_key": "admin-key-of-this-test"}
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "as_described",  # of helpers.schemathesis_checks
)
NEVER_OK = {("GET", "/v1/realtime"), ("POST", "/update_weights")}  # a WebSocket's, and refused without a directory
BOUNDS = ["--phases", "coverage", "--generation-deterministic"]
RANDOM = ["--phases", "fuzzing", "--seed", "1", "--max-examples", "200", "--generation-database", "none"]
PATHS = [(["--exclude-path-regex", POWER], {}), (["--include-path-regex", POWER], KEYS)]
SHORT = replace(DEFAULT_LIMITS, max_model_len=64)  # answers end soon


CHECKING = "helpers.schemathesis_checks"


def described_operations(server):
    routes = server.connections._routes
    return {(next(iter(route.handlers)), described_path(key)) for key, route in routes.items()}


@pytest.mark.parametrize(("paths", "keys"), PATHS, ids=["others", "power"])
@pytest.mark.parametrize("phase", [BOUNDS, pytest.param(RANDOM, marks=pytest.mark.slow)], ids=["bounds", "random"])
async def test_every_response_is_promised(tmp_path, paths, keys, phase):
    options = ["--warnings", "off", "--no-color", "--checks", ",".join(CHECKS), *phase, *paths]
    if keys:
        options += ["--header", f"Authorization: Bearer {keys['admin_key']}"]
    async with on_loopback(SHORT, **keys) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        run = await trio.run_process(
            [*command, *options],
            check=False,
            capture_stdout=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SCHEMATHESIS_HOOKS": CHECKING},
        )
        operations = described_operations(server)
    output = run.stdout.decode()
    assert run.returncode == 0, output
    checked = [line.split(" ", 3) for line in (tmp_path / "checked.txt").read_text().splitlines()]
    chosen = {(method, path) for method, path in operations if bool(re.search(POWER, path)) == bool(keys)}
    assert {(method, path) for method, path, *_ in checked} >= chosen
    assert {(method, path) for method, path, status, _ in checked if status == "200"} >= chosen - NEVER_OK
    if not keys:
        streamed = {path for _, path, _, kind in checked if kind.startswith("text/event-stream")}
        assert streamed == {"/v1/chat/completions", "/v1/completions"}
