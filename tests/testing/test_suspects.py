"""Suspect functions: those whose steps a program that fails took, and others that pass did not."""

import sys

import pytest
from mutants import MUTANTS

from trioengine.testing.fuzz import describe
from trioengine.testing.fuzz.core_machine import CoreMachine
from trioengine.testing.fuzz.describe import BESIDE_USERS, SUSPECTS, suspects_text
from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.parallel import Search, search
from trioengine.testing.fuzz.program import Program, ReplayFile, recorded
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, replayed, silence
from trioengine.testing.fuzz.suspects import suspects
from trioengine.testing.fuzz.trace import Trace


class Forgetful(LifecycleMachine):
    """Its program does something wrong after an abort, and the failure is noticed elsewhere."""

    is_wrong = False

    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=8)
        if completion.finish_reason == "abort":
            self.clean_up()

    def clean_up(self):
        self.is_wrong = True

    def check(self):
        assert not self.is_wrong, "something is wrong"


def found(machine):
    with silence():
        return Fuzzer(machine, PROFILES["quick"], seed=0).run(seconds=60).program


@pytest.fixture(scope="module")
def program():
    return found(Forgetful)


def test_the_function_that_only_failures_call_is_the_first(program):
    with silence():
        first = suspects(Forgetful, program).functions[0]
    assert (first.file, first.function, first.times) == (__file__, "Forgetful.clean_up", 0)


def test_they_are_the_same_each_time(program):
    with silence():
        assert suspects(Forgetful, program) == suspects(Forgetful, program)


def test_the_tracer_of_before_is_back(program):
    def tracer(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with silence():
            suspects(Forgetful, program)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_a_program_that_does_not_fail_again_has_none():
    with silence():
        assert suspects(Forgetful, Program("Forgetful")) is None
        assert suspects_text(Forgetful, Program("Forgetful")).startswith("it did not fail when it was run again")


def test_files_of_the_user_come_first(program):
    with silence():
        _, first, second, *_ = suspects_text(Forgetful, program).splitlines()
    assert "test_suspects.py: " in first and "Forgetful.clean_up (0)" in first
    assert second.startswith("  trioengine/")


def test_a_file_is_one_line_with_its_first_functions(program):
    with silence():
        _, *lines = suspects_text(Forgetful, program).splitlines()
    files = [line.partition(": ")[0] for line in lines]
    assert len(set(files)) == len(files) == 1 + BESIDE_USERS
    assert max(line.count(" (") for line in lines) == SUSPECTS


class Wrong(CoreMachine):
    """A machine without passes, whose rule fails."""

    @recorded()
    def fail(self):
        raise AssertionError("it fails")


def test_a_machine_without_passes_has_suspects_and_keeps_its_program():
    result = search(Search(Wrong, 0, "quick", 100, None, False), lambda report: None, lambda: False)
    assert result.text.startswith("AssertionError: it fails\n") and "\nsuspects, " in result.text
    assert not result.is_fuzzers_own and ReplayFile.from_json(result.replay_file).program.steps


def test_an_error_of_the_suspects_does_not_hide_the_failure(program, monkeypatch):
    def fail(*_):
        raise KeyError("a bug of ours")

    monkeypatch.setattr(describe, "suspects", fail)
    text = describe.failure_text(AssertionError("it fails"), Forgetful, program, Trace(lambda: (0, 0.0)))
    assert text.startswith("AssertionError: it fails\n") and "\nno suspects: KeyError: 'a bug of ours'\n" in text


@pytest.mark.parametrize(("id", "function"), [("F3", "_lose_aborts_of_the_waiting"), ("F12", "_do_not_wait")])
def test_the_function_with_the_bug_is_among_those_that_are_shown(id, function):
    mutant = MUTANTS[id]
    machine = MACHINES[mutant.machine]
    with mutant.active():
        program = found(machine)
        with silence():
            assert function in suspects_text(machine, program)
            assert suspects(machine, program).num_programs >= 20


def test_a_finding_in_a_users_program_shows_few_other_files_and_no_frames_of_the_kit(program):
    with silence():
        found = replayed(Forgetful, program)
        text = describe.failure_text(found.failure, Forgetful, program, found.trace)
    suspects_shown = [line for line in text.splitlines() if line.startswith("  trioengine/")]
    assert len(suspects_shown) == BESIDE_USERS
    traceback = text[text.index("Traceback") :]
    assert "in check\n" in traceback and "trioengine/testing" not in traceback
