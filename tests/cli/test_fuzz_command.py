"""`trioengine fuzz`: its output, the files that it keeps, and its exit codes."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

from trioengine.cli import fuzz
from trioengine.cli.app import run
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, ReplayFile, pick

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

if sys.argv.pop() == "while it is shrunk":
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

BEGIN = ("begin", {"sessions": 1, "turns": 0})
COMMIT = ("commit", {"which": 0})  # of what was never reserved


def test_what_is_found_is_kept_and_replayed(tmp_path, capsys):
    keep = tmp_path / "found.json"
    with MUTANTS["F25"].active():
        assert run(["fuzz", "--machine", "engine", "--seconds", "60", "--keep", str(keep)]) == 1
        output = capsys.readouterr().out
        assert "machine = EngineMachine()" in output and f"--replay {keep}\n" in output
        assert run(["fuzz", "--replay", str(keep)]) == 1
    replayed = capsys.readouterr()
    assert "blocks are counted" in replayed.out and "skipped" not in replayed.out and not replayed.err
    assert run(["fuzz", "--replay", str(keep)]) == 0, "the mutant is gone"
    replayed = capsys.readouterr()
    assert "blocks are counted" not in replayed.out and not replayed.err
    assert replayed.out.endswith("\nit does not fail\n")


def test_the_first_lines_name_the_failure_and_its_place(tmp_path, capsys):
    keep = tmp_path / "found.json"
    with MUTANTS["F25"].active():
        assert run(["fuzz", "--machine", "engine", "--keep", str(keep)]) == 1
    error, place, *rest = capsys.readouterr().out.splitlines()
    assert error.startswith("InvariantError: ") and "blocks are counted" in error
    assert re.fullmatch(r"at /.*trioengine/.*\.py:\d+, in \w+", place)
    first_screen = "\n".join(rest[:60])
    assert "machine = EngineMachine()" in first_screen and "begin(ready=" in first_screen, "the program and its trace"
    assert "Traceback" in "\n".join(rest), "behind these"


def test_a_trace_is_shown_whole(tmp_path, capsys):
    keep = tmp_path / "found.json"
    begin = ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 1, "thread_passes": 1})
    keep.write_text(Program("EngineMachine", [begin, ("settle", {}), ("leave", {"which": 0, "what": "end"})]).to_json())
    assert run(["fuzz", "--replay", str(keep), "--trace"]) == 0
    trace = capsys.readouterr().out
    for line in (
        "engine, awake: close",
        "worker 1001 <- ADD_SESSION session",
        "session 1, preparing, detached: ",
        "-> TOKENS session 1 request 2 length",
        "leave(which=0, what='end')",
        "  the end",
    ):
        assert line in trace, f"{line}\n{trace}"
    assert run(["fuzz", "--replay", str(keep)]) == 0
    assert "ADD_SESSION" not in capsys.readouterr().out


def test_an_error_of_the_fuzzer_is_no_finding(tmp_path, capsys, monkeypatch):
    keep = tmp_path / "found.json"
    begin = ("begin", {"ready": True, "sessions": 0, "turns": 0, "asks": 0, "thread_passes": 1})
    keep.write_text(Program("EngineMachine", [begin, ("settle", {})]).to_json())
    monkeypatch.setattr(EngineMachine, "_check", lambda machine: pick([], 0))
    assert run(["fuzz", "--replay", str(keep)]) == 3
    output = capsys.readouterr().out
    assert "the fuzzer itself failed: ZeroDivisionError" in output and "program.py" in output and "in pick" in output


CROWD = """
import trio
from trioengine.testing.fuzz import LifecycleMachine


class Crowd(LifecycleMachine):
    async def app(self, engine):
        await trio.sleep_forever()
"""


def test_a_replay_shows_all_tasks_that_wait_forever(tmp_path, capsys):
    keep, app = tmp_path / "found.json", tmp_path / "crowd.py"
    app.write_text(CROWD)
    keep.write_text(Program(f"{app}:Crowd", [("start", {}), ("start", {})]).to_json())
    assert run(["fuzz", "--replay", str(keep)]) == 1
    output = capsys.readouterr().out
    assert "(all of it is at the end)" in output and "\napp-2:\n" in output.partition("the end\n")[2], output


def test_other_versions_are_said(tmp_path, capsys):
    keep = tmp_path / "found.json"
    text = Program("CoreMachine", [BEGIN]).to_json()
    keep.write_text(text)
    assert run(["fuzz", "--replay", str(keep)]) == 0
    assert not capsys.readouterr().err
    keep.write_text(json.dumps(json.loads(text) | {"versions": {"python": "2.7", "trio": "0.1"}}))
    assert run(["fuzz", "--replay", str(keep)]) == 0
    error = capsys.readouterr().err
    assert "found with python 2.7, trio 0.1; here are python 3" in error and error.count("\n") == 1


def test_steps_whose_time_has_not_come_are_skipped(tmp_path, capsys):
    keep = tmp_path / "found.json"
    keep.write_text(Program("CoreMachine", [BEGIN, COMMIT, ("settle", {}), COMMIT]).to_json())
    assert run(["fuzz", "--replay", str(keep)]) == 0
    assert "4 rules, 2 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({"steps": [BEGIN, ("coverage", {})]}, "step 2: the machine CoreMachine has no rule 'coverage'"),
        ({"steps": [BEGIN, ("commit", {})]}, "step 2: commit takes which, and is given nothing"),
        ({"steps": [BEGIN], "versions": "new"}, "no replay file"),
    ],
)
def test_a_bad_file_is_no_finding(file, complaint, tmp_path, capsys):
    keep = tmp_path / "found.json"
    keep.write_text(json.dumps({"machine": "CoreMachine", **file}))
    assert run(["fuzz", "--replay", str(keep)]) == 2
    output = capsys.readouterr()
    assert complaint in output.err and str(keep) in output.err and not output.out


def test_so_many_programs_and_no_finding(tmp_path, capsys):
    keep = tmp_path / "found.json"
    assert run(["fuzz", "--examples", "100", "--seed", "3", "--jobs", "1", "--keep", str(keep)]) == 0
    output = capsys.readouterr().out
    for machine in MACHINES:
        assert re.search(f"{machine}, seed 3: 1[67] programs", output)
    number = r"[\d,]+ programs, [\d,]+ passes, [\d.]+ s"
    verdicts = "; ".join(f"{machine} {number}" for machine in MACHINES)
    assert re.fullmatch(f"nothing found: {verdicts}", output.splitlines()[0])
    assert "not reached" in output and "engine waking: left_alone" in output
    assert not keep.exists()


def test_what_was_kept_before_stays_if_nothing_is_found(tmp_path):
    keep = tmp_path / "found.json"
    keep.write_text("before")
    assert run(["fuzz", "--examples", "1", "--machine", "core", "--keep", str(keep)]) == 0
    assert keep.read_text() == "before"


@pytest.mark.parametrize(("examples", "shares"), [(1, [1, 1, 1]), (3, [1, 1, 1]), (20, [7, 7, 6]), (300, [100] * 3)])
def test_the_shares_add_up(examples, shares):
    assert fuzz.shares(examples, 3) == shares


def test_one_machine(tmp_path, capsys):
    assert run(["fuzz", "--examples", "20", "--machine", "core", "--keep", str(tmp_path / "found.json")]) == 0
    output = capsys.readouterr().out
    assert "CoreMachine, seed 0: 2" in output and "EngineMachine" not in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--machine", "X"], "no machine 'X'; there are engine, power, realtime, http, client, core, module:Class"),
        (["--machine", "no.such:Class"], "--machine: no module 'no.such'"),
        (["--machine", "no_such.py:Class"], "--machine: no file 'no_such.py'"),
        (["--machine", "trioengine.core.types:Usage"], "trioengine.core.types has no machine 'Usage'"),
        (["--replay", "/nowhere.json"], "error: /nowhere.json: No such file or directory\n"),
        (["--keep", "/nowhere/x.json"], "error: --keep /nowhere/x.json: No such file or directory\n"),
        (["--keep", "/"], "error: --keep /: Is a directory\n"),
        (["--profile", "lazy"], "quick"),
        (["--examples", "0"], "--examples"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["--seconds", "-1"], "--seconds must be more than 0"),
        (["--replay", "x", "--machine", "core"], "--replay and --machine"),
        (["--replay", "x", "--seconds", "1"], "--replay and --seconds"),
        (["--replay", "x", "--examples", "1"], "--replay and --examples"),
        (["--replay", "x", "--seed", "0"], "--replay and --seed"),
        (["--replay", "x", "--profile", "quick"], "--replay and --profile"),
        (["--replay", "x", "--keep", "x"], "--replay and --keep"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, complaint, capsys):
    assert run(["fuzz", *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1 and not printed.out


HOPEFUL = """
from trioengine.testing.fuzz import LifecycleMachine

class Hopeful(LifecycleMachine):
    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=20)
        assert completion.finish_reason != "abort", "it was aborted"
"""


@pytest.mark.parametrize("name", ["hopeful.py:Hopeful", "hopeful:Hopeful"])
def test_a_machine_of_another_file(name, tmp_path, capsys, monkeypatch):
    (tmp_path / "hopeful.py").write_text(HOPEFUL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hopeful", raising=False)
    assert run(["fuzz", "--machine", name, "--seconds", "30"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("AssertionError: it was aborted") and f"at {tmp_path / 'hopeful.py'}:7, in app" in output
    assert "machine = Hopeful()" in output
    assert run(["fuzz", "--replay", "fuzz-failure.json"]) == 1
    assert "it was aborted" in capsys.readouterr().out
    (tmp_path / "hopeful.py").write_text("1 +")
    monkeypatch.delitem(sys.modules, "hopeful")
    assert run(["fuzz", "--machine", name]) == 2
    assert "SyntaxError: invalid syntax" in capsys.readouterr().err


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


@pytest.mark.parametrize("when", ["while it is shrunk", "while it is trimmed"])
def test_an_interrupt_ends_it_and_keeps_what_was_found(tmp_path, when):
    keep = tmp_path / "found.json"
    ended = run_apart(INTERRUPTED, "--machine", "engine", "--keep", keep, when)
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
    ended = run_apart(MAIN, "--machine", f"{tmp_path}/blocked.py:Blocked", "--keep", tmp_path / "found.json")
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
