"""The peaks of this CPU, measured for a moment."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from helpers.torch_driver import needs_compiler

from trioengine.worker.roof import load_roof

COMMAND = (sys.executable, "-m", "trioengine", "bench", "roof", "--seconds", "0.001", "--num-threads", "1")
PEAKS = ["memory_gb_s", "int8_gop_s", "float32_gop_s", "bfloat16_gop_s"]


def run(*options, **environment):
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, env=os.environ | environment, check=False, timeout=300
    )


def test_the_peaks():
    needs_compiler()
    ended = run("--json")
    report = json.loads(ended.stdout)
    assert list(report) == ["threads", *PEAKS]
    assert report["threads"] == 1
    assert all(report[peak] > 0.1 for peak in PEAKS)
    assert report["int8_gop_s"] > 2 * report["memory_gb_s"]  # else no instruction was counted


@pytest.mark.parametrize("at_most", [None, "VNNI", "AVX512", "AVX2", "0"])
def test_every_instruction_set(at_most):
    needs_compiler()
    native, count = load_roof(at_most), ctypes.c_int64
    assert native.numbers_in_a_lane() in (1, 2)
    for name in ("multiply_integers", "multiply_floats", "multiply_bfloat16"):
        assert getattr(native, name)(count(3), count(1)) != 0, name


def test_the_table_has_units():
    needs_compiler()
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["threads", *PEAKS]
    assert lines[1].endswith("GB/s of memory that is read, in huge pages")


def test_without_a_compiler(tmp_path):
    ended = run(PATH=str(tmp_path), TRIOENGINE_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.startswith("the roof cannot be measured: ")
    assert "no C++ compiler found; install g++" in ended.stderr
