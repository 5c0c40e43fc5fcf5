"""A failure that one process has kept is the first program of the next, whatever its addresses, hashes and folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trioengine

APP = """
import sys
from hypothesis import Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test
from trioengine.testing.fuzz import LifecycleMachine
from trioengine.testing.fuzz.machine import Finding
from trioengine.testing.fuzz.runner import silence

PROGRAMS = []
PHASES = (Phase.reuse, Phase.generate)  # shrinking takes long


class Hopeful(LifecycleMachine):
    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=20)
        assert completion.finish_reason != "abort", "it was aborted"

    def teardown(self):
        PROGRAMS.append(self)
        super().teardown()


class Inherited(Hopeful):
    def __init__(self):
        super().__init__()


if __name__ == "__main__":
    database = DirectoryBasedExampleDatabase(sys.argv[2])
    try:
        with silence():
            run_state_machine_as_test(
                globals()[sys.argv[1]],
                settings=settings(max_examples=1000, deadline=None, database=database, phases=PHASES, print_blob=False),
            )
    except Finding:
        print("found" if PROGRAMS[0].finding is not None else "searched")
"""
TEST = """
import os
import pytest
from app import PROGRAMS, Hopeful


class Fixed(Hopeful):
    if "FIXED" in os.environ:
        async def app(self, engine):
            await engine.ask("to be", max_tokens=20)


@pytest.mark.lifecycle(examples=500)
def test_app(lifecycle_fuzzer):
    PROGRAMS.clear()
    try:
        lifecycle_fuzzer(Fixed)
    finally:
        print("first finding:", PROGRAMS[0].finding)
"""


def run(folder, *command, hash_seed, **environment):
    paths = f"{Path(trioengine.__file__).parents[1]}{os.pathsep}{folder}"
    environment |= os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("machine", ["Hopeful", "Inherited"])
def test_hypothesis_database_is_good_for_the_next_process(machine, tmp_path):
    keys, folders = [], [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "app.py").write_text(APP)
        output = run(folder, "app.py", machine, str(tmp_path / "examples"), hash_seed=number)
        assert output == ("found\n" if number else "searched\n")
        keys.append({path.name for path in (tmp_path / "examples").iterdir()})
    assert keys[0] == keys[1]


def test_pytest_replays_the_kept_program_first(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "test_app.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["trioengine.testing.pytest_plugin"]')
    pytest_here = ("-m", "pytest", "-rA", "-q", "test_app.py")
    first, second = (run(tmp_path, *pytest_here, hash_seed=number) for number in range(2))
    assert "first finding: None" in first and "1 failed" in first and "found in program" in first
    assert "first finding: AssertionError: it was aborted\n" in second and "1 failed" in second
    assert "kept from an earlier run" in second and "trioengine fuzz --replay" in second
    third, fourth = (run(tmp_path, *pytest_here, hash_seed=2, FIXED="1") for _ in range(2))
    assert "1 passed" in third and "1 passed" in fourth
    assert not list(tmp_path.rglob("*.json")), "the program that passes is kept no more"
