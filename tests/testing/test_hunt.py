"""The table of hunted mutants."""

import hunt
import pytest
from mutants import MUTANTS

from trioengine.testing.fuzz.program import Program

FOUND = [
    ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 1, "thread_passes": 1}),
    ("settle", {}),
]


def test_a_mutant_is_found_and_its_program_printed(capsys):
    assert hunt.main(["--mutant", "F25", "--seeds", "1"]) == 0
    printed = capsys.readouterr()
    assert "F25: 1 of 1" in printed.err
    assert "machine = EngineMachine()" in printed.out and MUTANTS["F25"].failure in printed.out


def test_a_finding_that_fails_without_the_mutant_does_not_count(monkeypatch, capsys):
    replayed = hunt.replayed
    monkeypatch.setattr(
        hunt, "replayed", lambda *program: replayed(*program)._replace(failure=ValueError("a bug of ours"))
    )
    assert hunt.main(["--mutant", "F3", "--mutant", "F25", "--seeds", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("0 of 1") == 2 and "WITHOUT F3, too: a bug of ours" in printed.err
    assert "0/2" in printed.out


def test_a_program_is_replayed_with_a_mutant(tmp_path, capsys):
    kept = tmp_path / "found.json"
    kept.write_text(Program("EngineMachine", FOUND).to_json())
    assert hunt.main(["--mutant", "F25", "--replay", str(kept)]) == 1
    assert "2 rules, 0 skipped, mutant F25: " in capsys.readouterr().out
    assert hunt.main(["--mutant", "F24", "--replay", str(kept)]) == 0
    with pytest.raises(SystemExit):
        hunt.main(["--replay", str(kept)])
