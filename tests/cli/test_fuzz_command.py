"""`trioengine fuzz`: its output, the files that it keeps, and its exit codes."""

import json
import re
import sys

import pytest
from mutants import MUTANTS

from trioengine.cli import fuzz
from trioengine.cli.app import run
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, pick

BEGIN = ("begin", {"sessions": 1, "turns": 0})
COMMIT = ("commit", {"which": 0})  # of what was never reserved


def test_what_is_found_is_kept_and_replayed(tmp_path, capsys):
    keep = tmp_path / "found.json"
    with MUTANTS["F25"].active():
        assert run(["fuzz", "--machine", "engine", "--seconds", "60", "--jobs", "1", "--keep", str(keep)]) == 1
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
        assert run(["fuzz", "--machine", "engine", "--jobs", "1", "--keep", str(keep)]) == 1
    error, place, *rest = capsys.readouterr().out.splitlines()
    assert error.startswith("InvariantError: ") and "blocks are counted" in error
    assert re.fullmatch(r"at /.*trioengine/.*\.py:\d+, in \w+", place)
    first_screen = "\n".join(rest[:60])
    assert "machine = EngineMachine" in first_screen and "machine.begin(" in first_screen, "the program and its trace"
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
        "session 3, preparing, detached: ",  # behind the ids of two adapters
        "-> TOKENS session 3 request 4 length",
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
