"""The README's code runs on the real model, and its counts and pictures match their sources."""

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from trioengine.testing import simulated_engine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_program_runs(smollm2):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 12
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r".+\nnothing leaked\n", ended.stdout, re.DOTALL)


def test_the_table_counts_the_lines_of_the_comparison():
    blocks = re.findall(r"```py\n(.*?)```", (DOCS / "comparison.md").read_text(), re.DOTALL)
    (row,) = re.findall(r"^\| lines of code \|(.*)\|$", README, re.MULTILINE)
    assert [int(count) for count in row.split("|")] == [len(block.split("\n")) - 1 for block in blocks]
    for block in blocks:
        assert "\n\n" not in block
        assert max(map(len, block.splitlines())) <= 130
        compile(block, "comparison.md", "exec")


async def test_our_lines_of_the_comparison_stop_the_generation(autojump_clock):
    namespace = {}
    exec(re.search(r"```py\n(.*?)```", (DOCS / "comparison.md").read_text(), re.DOTALL)[1], namespace)
    sent = []

    async def send(text):
        sent.append(text)
        if len(sent) == 3:
            raise ConnectionError

    async with simulated_engine() as (engine, _):
        with pytest.raises(ConnectionError):
            await namespace["stream"](engine, "hello", send)
        await engine.check_invariants()
        assert engine.statistics().sessions == 0


def test_the_test_line_is_where_ci_looks_for_it():
    after = README.partition("<!-- test line -->\n```sh\n")[2].splitlines()
    assert after[0].startswith("python3 -m venv .venv && ") and " -m pytest -n auto " in after[0]
    assert after[1] == "```"


def test_the_picture_of_the_sessions_equals_its_scripts_output():
    assert (DOCS / "sessions.svg").read_text() == module("make_picture").picture(), "run python docs/make_picture.py"


@pytest.mark.parametrize("name", ["sessions.svg", "recording.svg"])
def test_pictures_are_svg_for_light_and_dark_pages(name):
    text = (DOCS / name).read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    assert "<title>" in text
    assert ("animation" in text) == ("prefers-reduced-motion" in text)


def test_a_recording_shows_each_piece_at_its_time():
    make = module("make_recording")
    pieces = [
        make.Text(0.0, 0, "$ chat\n", "typed"),
        make.Text(1.0, 0, "<b> & " + "x" * make.COLUMNS),
        make.Text(2.0, 1, "$ kill -9 1\n", "typed"),
        make.Text(3.0, 0, "\nend"),
    ]
    runs = make.runs_of([piece for piece in pieces if piece.pane == 0])
    assert [(run.time, run.row, run.column, len(run.text)) for run in runs] == [
        (0.0, 0, 0, 6),
        (1.0, 1, 0, 80),
        (1.0, 2, 0, 6),
        (3.0, 3, 0, 3),
    ]
    svg = make.picture(pieces)
    ElementTree.fromstring(svg)
    assert "&lt;b&gt; &amp; " in svg
    shares = re.findall(r"([\d.]+)% \{ visibility: visible", svg)
    assert shares == ["0.00", "12.50", "12.50", "37.50", "25.00"]
    assert svg.count("8.00s step-end infinite") == 5
    assert 'class="text kill"' in svg


def test_long_waits_of_a_recording_are_shortened():
    make = module("make_recording")
    pieces = [make.Text(time, 0, "x") for time in (0.0, 20.0, 21.0, 51.0, 52.5)]
    wait = make.LONGEST_WAIT
    assert [piece.time for piece in make.shortened(pieces)] == [0.0, wait, wait + 1, 2 * wait + 1, 2 * wait + 2.5]


def test_a_recording_of_the_repository_shows_the_kill_before_the_end_of_the_answer():
    text = (DOCS / "recording.svg").read_text()
    times = dict(re.findall(r"@keyframes (k\d+) .*?([\d.]+)% \{ visibility: visible", text))
    shown = re.findall(r'class="text ?(\w*)".*?animation: (k\d+) .*?>([^<]*)</text>', text)
    (killed,) = (float(times[name]) for kind, name, _ in shown if kind == "kill")
    answer = [float(times[name]) for kind, name, _ in shown if not kind]
    assert min(answer) < killed < max(answer)
