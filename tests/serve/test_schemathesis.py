"""schemathesis makes requests from /openapi.json: each gets a response that the document promises, and no 5xx.

Each bound and each option of a field is tried, the same in each run; `--slow` adds random requests of one seed. The
routes that put the engine to sleep have a server of their own, and so has the one of embedding models.
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
CHECKING = "helpers.schemathesis_checks"
NEVER_OK = {  # a WebSocket's, and refused without a directory, or an adapter
    ("GET", "/v1/realtime"),
    ("POST", "/update_weights"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
BOUNDS = ["--phases", "coverage", "--generation-deterministic"]
RANDOM = ["--phases", "fuzzing", "--seed", "1", "--max-examples", "200", "--generation-database", "none"]
POWER, STREAMS, EMBEDDINGS = "sleep|wake", "completions", "embeddings"
GROUPS = {  # the paths of each, and the fields of its server's ServeConfig
    "others": (f"^(?!.*({POWER}|{EMBEDDINGS}))", {}),
    "embeddings": (EMBEDDINGS, {}),
    "power": (POWER, KEYS),
    "streams": (STREAMS, {}),
}
SHORT = replace(DEFAULT_LIMITS, max_model_len=64)  # answers end soon


def described_operations(server):
    routes = server.connections._routes
    return {(next(iter(route.handlers)), described_path(key)) for key, route in routes.items()}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("phase", [BOUNDS, pytest.param(RANDOM, marks=pytest.mark.slow)], ids=["bounds", "random"])
async def test_every_response_is_promised(tmp_path, group, phase):
    """Each operation of the group is tried, and answered with 200 as well; both routes that stream do stream."""
    paths, keys = GROUPS[group]
    options = ["--warnings", "off", "--no-color", "--checks", ",".join(CHECKS), *phase, "--include-path-regex", paths]
    if keys:
        options += ["--header", f"Authorization: Bearer {keys['admin_key']}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SCHEMATHESIS_HOOKS": CHECKING}
    if group == "streams":
        environment["STREAMED"] = "true"
    (tmp_path / "schemathesis.toml").write_text("max-stream-events = 100000\n")  # streams are read to their end
    async with on_loopback(replace(SHORT, embeds=group == "embeddings"), **keys) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        run = await trio.run_process(
            [*command, *options], check=False, capture_stdout=True, cwd=tmp_path, env=environment
        )
        chosen = {operation for operation in described_operations(server) if re.search(paths, operation[1])}
    output = run.stdout.decode()
    assert run.returncode == 0, output
    lines = (tmp_path / "checked.txt").read_text().splitlines()
    checked = [tuple(line.split(" ", 3)) for line in lines]
    assert chosen - {(method, path) for method, path, *_ in checked} == set()
    assert chosen - NEVER_OK - {(method, path) for method, path, status, _ in checked if status == "200"} == set()
    if group == "streams":
        kinds = {(path, kind) for _, path, status, kind in checked if status == "200"}
        assert kinds == {(path, "text/event-stream") for _, path in chosen}
