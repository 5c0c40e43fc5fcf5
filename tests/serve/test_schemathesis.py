"""schemathesis makes requests from /openapi.json: each gets a response that the document promises, and no 5xx.

Each bound and each option of a field is tried, the same in each run; `--slow` adds random requests of one seed. The
routes that put the engine to sleep have a server of their own.
"""

import sys
from dataclasses import replace

import pytest
import trio
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
)
BOUNDS = ["--phases", "coverage", "--generation-deterministic"]
RANDOM = ["--phases", "fuzzing", "--seed", "1", "--max-examples", "200", "--generation-database", "none"]
PATHS = [(["--exclude-path-regex", POWER], {}), (["--include-path-regex", POWER], KEYS)]
SHORT = replace(DEFAULT_LIMITS, max_model_len=64)  # answers end soon


@pytest.mark.parametrize(("paths", "keys"), PATHS, ids=["others", "power"])
@pytest.mark.parametrize("phase", [BOUNDS, pytest.param(RANDOM, marks=pytest.mark.slow)], ids=["bounds", "random"])
async def test_every_response_is_promised(tmp_path, paths, keys, phase):
    options = ["--warnings", "off", "--no-color", "--checks", ",".join(CHECKS), *phase, *paths]
    if keys:
        options += ["--header", f"Authorization: Bearer {keys['admin_key']}"]
    async with on_loopback(SHORT, **keys) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        run = await trio.run_process([*command, *options], check=False, capture_stdout=True, cwd=tmp_path)
    output = run.stdout.decode()
    assert run.returncode == 0, output
    assert "Selected: " in output and " 0 generated" not in output
