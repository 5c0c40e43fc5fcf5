"""Where the time of steps goes: the parts, and what is computed in them."""

import json
import os
import subprocess
import sys

import pytest
from helpers import tiny_llama
from helpers.torch_driver import needs_compiler

COMMAND = (sys.executable, "-m", "trioengine", "bench", "offline", "--profile", "--num-threads", "1")
WORK = ("--requests", "3", "--prompt-len", "10", "--output-len", "4", "--kv-cache-memory", str(4 << 20))
OF_PYTHON = {"scheduling", "batch", "other model", "sampling"}
PRODUCTS = {"qkv", "output", "gate_up", "down", "head"}
OPERATIONS = {"norms", "attention", "activation", "best"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Three layers of 64 columns, whose products are of integers with `int8`."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_llama.write(tmp_path_factory.mktemp("model") / "model", "plain", **shape)


def run(path, *options, **environment):
    return subprocess.run(
        [*COMMAND, str(path), *WORK, *options],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
        timeout=300,
    )


def test_the_parts(path):
    needs_compiler()
    report = json.loads(run(path, "--quantization", "int8", "--json").stdout)
    assert (report["steps"], report["tokens"], report["quantization"]) == (4, 3 * (10 + 3), "int8")
    parts = report["parts"]
    assert set(parts) == OF_PYTHON | PRODUCTS | OPERATIONS
    assert all(part["seconds"] >= 0 for part in parts.values())
    assert sum(part["seconds"] for part in parts.values()) <= report["seconds"]
    assert report["roof"]["threads"] == 1
    computed = {name: (part["integer_operations"], part["float_operations"]) for name, part in parts.items()}
    tokens, sampled = 39, 12  # of them; the last layer goes on with these alone
    assert {name: operations for name, operations in computed.items() if any(operations)} == {
        "qkv": (2 * 3 * tokens * 64 * 128, 0),
        "output": (2 * (2 * tokens + sampled) * 64 * 64, 0),
        "gate_up": (2 * (2 * tokens + sampled) * 64 * 192, 0),
        "down": (2 * (2 * tokens + sampled) * 96 * 64, 0),
        "head": (0, 2 * sampled * 64 * 200),
    }
    # Of an output: its codes, two factors for each 32, and its unit.
    assert parts["qkv"]["weight_bytes"] == 4 * 3 * 128 * (64 + 2 * 2 * 2 + 4)


def test_the_table(path):
    needs_compiler()
    first, header, *rows, roof = run(path).stdout.splitlines()
    assert first.startswith("4 steps, 39 tokens, ") and first.endswith(", quantization none")
    assert header.split() == ["part", "s", "share", "10^9", "op/s", "GB/s", "of", "the", "roof"]
    figures = {row[:14].rstrip(): row[14:].split() for row in rows}
    assert set(figures) == OF_PYTHON | PRODUCTS | OPERATIONS
    assert {name for name, values in figures.items() if len(values) == 5} == PRODUCTS
    assert sum(float(values[1].rstrip("%")) for values in figures.values()) == pytest.approx(100, abs=1)
    assert roof.startswith("the roof: ")


def test_other_kernels_have_fewer_parts(path):
    needs_compiler()
    assert set(json.loads(run(path, "--kernels", "torch", "--json").stdout)["parts"]) == OF_PYTHON


def test_work_beyond_the_context(path):
    needs_compiler()
    ended = run(path, "--prompt-len", "300")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("the profile cannot be made: ")
    assert "256" in ended.stderr


@pytest.mark.parametrize(
    "option", ["--structured", "--enable-prefix-caching", "--num-speculative-tokens=4", "--draft-model=any"]
)
def test_options_that_it_does_not_have(path, option):
    ended = run(path, option)
    assert ended.returncode == 2
    assert (
        "--profile runs without --structured, --enable-prefix-caching, --num-speculative-tokens and --draft-model"
        in ended.stderr
    )


def test_without_a_compiler(path, tmp_path):
    ended = run(path, PATH=str(tmp_path), TRIOENGINE_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert "the profile cannot be made: " in ended.stderr and "no C++ compiler found" in ended.stderr
