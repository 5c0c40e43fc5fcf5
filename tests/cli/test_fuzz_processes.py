"""`trioengine fuzz` as a process, and with processes of its own: interrupts, jobs, and deaths."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trioengine.cli.fuzz import SEEDS_APART
from trioengine.testing.fuzz.program import ReplayFile

MAIN = "from trioengine.cli import main\nraise SystemExit(main())"
INTERRUPTED = """
import signal, sys
from mutants import MUTANTS
from trioengine.cli import main
from trioengine.testing.fuzz.runner import Fuzzer

count = Fuzzer._count

def interrupt_after_the_finding(self, machine):
    count(self, machine)
    if machine.finding is not None:
        Fuzzer._count = count
        signal.raise_signal(signal.SIGINT)

if sys.argv.pop() == "when it is found":
    Fuzzer._count = interrupt_after_the_finding
else:
    make = Fuzzer._make

    def interrupt_while_trimmed(self):
        if self.report.failure is not None:
            Fuzzer._make = make
            signal.raise_signal(signal.SIGINT)
        return make(self)

    Fuzzer._make = interrupt_while_trimmed
with MUTANTS["F25"].active():
    sys.exit(main())
"""


def run_apart(script, *arguments):
    """Run the command behind a script that uses `main`, a text or a file, in a process of its own."""
    how = [str(script)] if isinstance(script, Path) else ["-c", script]
    command = [sys.executable, *how, "fuzz", *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def written(folder, text):
    """A script in a file, which the processes of searches import, too."""
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("when", ["when it is found", "while it is shrunk"])
def test_an_interrupt_ends_it_and_keeps_what_was_found(tmp_path, when):
    keep = tmp_path / "found.json"
    ended = run_apart(INTERRUPTED, "--machine", "engine", "--jobs", 1, "--keep", keep, when)
    assert ended.returncode == 130
    assert "machine = EngineMachine()" in ended.stdout
    assert ReplayFile.from_json(keep.read_text()).program.steps


WITH_A_MUTANT = """
import sys
from mutants import MUTANTS
from trioengine.cli import main
active = MUTANTS["F25"].active()
active.__enter__()
if __name__ == "__main__":
    sys.exit(main())
"""


def test_jobs_change_nothing_but_the_time():
    def output(*arguments):
        ended = run_apart(MAIN, *arguments)
        assert (ended.returncode, ended.stderr) == (0, "")
        return re.sub(r"[\d.]+ s\b|\d+/s", "", ended.stdout)

    assert output("--examples", 60, "--jobs", 1) == output("--examples", 60, "--jobs", 3)


def test_jobs_find_the_same(tmp_path):
    keep, script = tmp_path / "found.json", written(tmp_path, WITH_A_MUTANT)

    def found(*arguments):
        ended = run_apart(script, "--examples", 1200, "--keep", keep, *arguments)
        assert (ended.returncode, ended.stderr) == (1, "")
        return keep.read_text()

    assert found("--jobs", 1) == found("--jobs", 4)


def test_one_machine_searches_in_several_processes(tmp_path):
    ended = run_apart(MAIN, "--machine", "core", "--seconds", 0.5, "--jobs", 2)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.match(r"nothing found: CoreMachine [\d,]+ programs, ", ended.stdout)
    assert ended.stdout.count("CoreMachine, seed 0: ") == 1
    keep, script = tmp_path / "found.json", written(tmp_path, WITH_A_MUTANT)
    ended = run_apart(script, "--machine", "engine", "--seed", 5, "--jobs", 2, "--keep", keep)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "machine = EngineMachine()" in ended.stdout
    assert json.loads(keep.read_text())["seed"] in (5, 5 + SEEDS_APART)


INTERRUPTED_PARENT = """
import os, signal, sys
from trioengine.cli import fuzz, main

def interrupt(self, report, sent=[]):
    if not sent:
        sent.append(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

fuzz.Progress.show = interrupt
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_all_searches(tmp_path, jobs):
    ended = run_apart(written(tmp_path, INTERRUPTED_PARENT), "--seconds", 1000, "--jobs", jobs)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert ended.stdout.startswith("nothing found, and interrupted: EngineMachine ")
    assert ("PowerMachine" in ended.stdout) == (jobs == 2)


BLOCKED = """
import signal
from trioengine.testing.fuzz import LifecycleMachine

class Blocked(LifecycleMachine):
    async def app(self, engine):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it goes on")
"""


def test_a_second_interrupt_ends_a_program_that_blocks(tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED)
    machine, keep = f"{tmp_path}/blocked.py:Blocked", tmp_path / "found.json"
    ended = run_apart(MAIN, "--machine", machine, "--jobs", 1, "--keep", keep)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert ended.stdout.startswith("nothing found, and interrupted: Blocked ")


DYING = """
import os, sys
from trioengine.cli import main
from trioengine.testing.fuzz import parallel

search = parallel.search

def search_or_die(task, *args):
    if task.machine.__name__ == "PowerMachine":
        os._exit(7)
    return search(task, *args)

parallel.search = search_or_die
if __name__ == "__main__":
    sys.exit(main())
"""


def test_a_process_that_dies_is_named(tmp_path):
    ended = run_apart(written(tmp_path, DYING), "--examples", 60, "--jobs", 2)
    assert ended.returncode == 3
    assert ended.stderr == "trioengine: error: the fuzzer failed: the process of PowerMachine ended with exit code 7\n"


DYING_FINDER = """
import os, sys
from mutants import MUTANTS
from trioengine.cli import main
from trioengine.testing.fuzz import runner

def die(*_):
    os._exit(9)

runner.trimmed = die
active = MUTANTS["F25"].active()
active.__enter__()
if __name__ == "__main__":
    sys.exit(main())
"""


def test_the_program_of_a_process_that_dies_is_kept(tmp_path):
    keep = tmp_path / "found.json"
    ended = run_apart(written(tmp_path, DYING_FINDER), "--seconds", 60, "--keep", keep)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert re.match(
        "a program fails, and when it was to be shrunk, the process of .* ended with exit code 9", ended.stdout
    )
    assert ReplayFile.from_json(keep.read_text()).program.steps


FAILING = """
import sys
from trioengine.cli import main
from trioengine.testing.fuzz.runner import Fuzzer

def fail(self, **limits):
    raise TypeError("a bug")

Fuzzer.run = fail
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_search_is_the_fuzzers_own(tmp_path, jobs):
    ended = run_apart(written(tmp_path, FAILING), "--examples", 60, "--jobs", jobs)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout.startswith("the fuzzer itself failed: TypeError: a bug\n")


def test_searches_end_with_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from trioengine.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    command = [sys.executable, str(script), "fuzz", "--seconds", "1000", "--jobs", "2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()  # whose write end the searches inherit
    parent = subprocess.Popen(command, env=env, pass_fds=[write], stdout=subprocess.DEVNULL)
    os.close(write)
    while not (children := children_of(parent.pid)):
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    assert children and not os.read(read, 1), "every process has ended"
    os.close(read)


def children_of(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []
