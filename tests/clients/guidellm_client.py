"""guidellm against text completions and chat completions, with prompts that it makes itself."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from report import BASE_URL, FOLDER, MODEL, TOKENIZER, report

REQUESTS, OUTPUT_LEN = 6, 16


def run(name, profile, **backend):
    """Run a benchmark, and compare its counts with the configured ones."""
    output = Path(FOLDER) / f"{name}.json"
    target = {"kind": "openai_http", "target": BASE_URL, "model": MODEL, **backend}
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", json.dumps(target), "--profile", json.dumps(profile)]
    command += ["--constraint", json.dumps({"kind": "max_requests", "count": REQUESTS})]
    command += ["--tokenizer", json.dumps({"kind": "huggingface_auto", "model": TOKENIZER})]
    data = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": OUTPUT_LEN}
    command += ["--data", json.dumps(data), "--output", json.dumps({"kind": "json", "path": str(output)})]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise AssertionError(" ".join((done.stderr or done.stdout).split())[-300:])
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["errored"]) == 0, requests["errored"][0]["info"]["error"]
    assert len(requests["successful"]) == REQUESTS
    assert {each["output_tokens"] for each in requests["successful"]} == {OUTPUT_LEN}


CONCURRENT = {"kind": "concurrent", "streams": 3}
report(
    {
        "chat completions": partial(run, "chat", CONCURRENT),
        "text completions": partial(run, "text", CONCURRENT, request_format="/v1/completions"),
        "without streams": partial(run, "whole", {"kind": "synchronous"}, stream=False),
    }
)
