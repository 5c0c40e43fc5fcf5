"""The plugin for pytest, in a pytest of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trioengine

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(trioengine.__file__).parents[1])}
CONFTEST = 'pytest_plugins = ["trioengine.testing.pytest_plugin"]'
TESTS = """
import pytest
from trioengine.testing.fuzz import LifecycleMachine


class Chat(LifecycleMachine):
    async def app(self, engine):
        await engine.ask("to be", max_tokens=3)


class Hopeful(LifecycleMachine):
    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=20)
        assert completion.finish_reason != "abort", "it was aborted"


@pytest.mark.lifecycle(examples=20)
def test_chat(lifecycle_fuzzer):
    report = lifecycle_fuzzer(Chat)
    print("programs:", report.programs // 10, "seed:", report.seed)


def test_hopeful(lifecycle_fuzzer):
    lifecycle_fuzzer(Hopeful)


@pytest.mark.lifecycle(profile="lazy")
def test_an_unknown_profile(lifecycle_fuzzer):
    pass


@pytest.mark.lifecycle(seeds=3)
def test_an_unknown_argument(lifecycle_fuzzer):
    pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_app.py").write_text(TESTS)

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-rA", "--strict-markers", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        ).stdout

    return run


def test_a_correct_program_passes(run_pytest):
    assert "programs: 2 seed: 0" in run_pytest("-k", "test_chat")
    assert "programs: 3 seed: 5" in run_pytest("-k", "test_chat", "--fuzz-seed", "5", "--fuzz-examples", "30")


def test_a_failure_shows_how_to_replay_it(run_pytest, tmp_path):
    output = run_pytest("-k", "test_hopeful")
    assert "AssertionError: it was aborted\n" in output and f"\nat {tmp_path / 'test_app.py'}:14, in app\n" in output
    assert "machine = Hopeful()" in output and "machine.start()" in output, "the program"
    assert "worker 1001 -> READY" in output, "the trace"
    replay = next(line for line in output.splitlines() if line.startswith("trioengine fuzz --replay "))
    kept = json.loads(Path(replay.split()[-1]).read_text())
    assert kept["machine"] == "test_app.py:Hopeful"
    command = [sys.executable, "-m", "trioengine", *replay.split()[1:]]
    replayed = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert replayed.returncode == 1 and "it was aborted" in replayed.stdout, replayed.stderr


def test_an_error_of_the_machine_keeps_the_failure(run_pytest, tmp_path):
    replay = next(line for line in run_pytest("-k", "test_hopeful").splitlines() if "fuzz --replay " in line)
    kept = Path(replay.split()[-1])
    broken = "class Hopeful(LifecycleMachine):\n    def __init__(self):\n        raise ValueError('of its own')\n"
    (tmp_path / "test_app.py").write_text(TESTS.replace("class Hopeful(LifecycleMachine):\n", broken))
    assert "ValueError: of its own" in run_pytest("-k", "test_hopeful") and kept.exists()
    other = "class Hopeful(LifecycleMachine):\n    start = None\n"
    (tmp_path / "test_app.py").write_text(TESTS.replace("class Hopeful(LifecycleMachine):\n", other))
    assert "1 passed" in run_pytest("-k", "test_hopeful") and not kept.exists(), "its rules have changed"


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("profile", "no profile 'lazy'; there are quick, deep"),
        ("argument", "the marker lifecycle takes profile, examples and seed, not seeds"),
    ],
)
def test_a_wrong_marker_is_refused(test, complaint, run_pytest):
    assert complaint in run_pytest("-k", f"test_an_unknown_{test}")
