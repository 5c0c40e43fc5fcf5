"""`trioengine fuzz`: what it prints, keeps and returns."""

import pytest

from trioengine.cli.app import run


def test_a_mutant_is_found_kept_and_replayed(tmp_path, capsys):
    keep = tmp_path / "found.json"
    assert run(["fuzz", "--mutant", "F25", "--seconds", "60", "--keep", str(keep)]) == 1
    output = capsys.readouterr().out
    assert "machine = EngineMachine()" in output and f"--replay {keep} --mutant F25" in output
    assert run(["fuzz", "--replay", str(keep), "--mutant", "F25"]) == 1
    first = capsys.readouterr().out
    assert "blocks are counted" in first
    assert run(["fuzz", "--replay", str(keep)]) == 0  # the engine itself does nothing wrong
    assert "blocks are counted" not in capsys.readouterr().out


def test_so_many_programs_and_no_finding(tmp_path, capsys):
    keep = tmp_path / "found.json"
    assert run(["fuzz", "--examples", "60", "--seed", "3", "--keep", str(keep)]) == 0
    output = capsys.readouterr().out
    for machine in ("EngineMachine", "RealtimeMachine", "CoreMachine"):
        assert f"{machine}, seed 3: 2" in output
    assert not keep.exists()


def test_one_machine(tmp_path, capsys):
    assert run(["fuzz", "--examples", "20", "--machine", "core", "--keep", str(tmp_path / "found.json")]) == 0
    output = capsys.readouterr().out
    assert "CoreMachine, seed 0: 2" in output and "EngineMachine" not in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--mutant", "F999"], "no mutant 'F999'; there are F1, "),
        (["--machine", "X"], "no machine 'X'; there are engine, realtime, core"),
        (["--replay", "/nowhere.json"], "/nowhere.json: "),
        (["--profile", "lazy"], "quick"),
        (["--examples", "0"], "--examples"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, complaint, capsys):
    assert run(["fuzz", *arguments]) == 2
    assert complaint in capsys.readouterr().err
