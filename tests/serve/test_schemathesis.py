"""schemathesis makes requests from /openapi.json: each gets a response that the document promises, and no 5xx.

Its examples are the same in each run. The routes that put the engine to sleep have a server of their own.
"""

import sys

import pytest
import trio
from helpers.loopback import on_loopback

POWER = "(sleep|wake)"
KEYS = {"api_key": "user-key-of-this-test", "admin_key": "admin-key-of-this-test"}
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
RUNS = [
    pytest.param(["--exclude-path-regex", POWER], "fuzzing", {}, id="others"),
    pytest.param(["--include-path-regex", POWER], "fuzzing", KEYS, id="power"),
    pytest.param(["--exclude-path-regex", POWER], "coverage", {}, id="others, each bound", marks=pytest.mark.slow),
    pytest.param(["--include-path-regex", POWER], "coverage", KEYS, id="power, each bound", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("paths", "phase", "keys"), RUNS)
async def test_every_response_is_promised(tmp_path, paths, phase, keys):
    options = ["--generation-deterministic", "--max-examples", "10", "--warnings", "off", "--no-color"]
    options += ["--phases", phase, "--checks", ",".join(CHECKS), *paths]
    if keys:
        options += ["--header", f"Authorization: Bearer {keys['admin_key']}"]
    async with on_loopback(**keys) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        run = await trio.run_process([*command, *options], check=False, capture_stdout=True, cwd=tmp_path)
    output = run.stdout.decode()
    assert run.returncode == 0, output
    assert "Selected: " in output and " 0 generated" not in output
