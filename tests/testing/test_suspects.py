"""Suspect functions: those whose steps a program that fails took, and others that pass did not."""

import sys

import pytest
from mutants import MUTANTS

from trioengine.testing.fuzz.describe import suspects_text
from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence
from trioengine.testing.fuzz.suspects import suspects


class Forgetful(LifecycleMachine):
    """Its program does something wrong after an abort, and the failure is noticed elsewhere."""

    async def app(self, engine):
        self.is_wrong = False
        completion = await engine.ask("to be", max_tokens=8)
        if completion.finish_reason == "abort":
            self.clean_up()

    def clean_up(self):
        self.is_wrong = True

    def check(self):
        assert not getattr(self, "is_wrong", False), "something is wrong"


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


def test_a_program_without_rules_has_suspects():
    with silence():
        assert suspects(Forgetful, Program("Forgetful")).functions


@pytest.mark.parametrize(("id", "function"), [("F3", "_lose_aborts_of_the_waiting"), ("F12", "_do_not_wait")])
def test_the_function_with_the_bug_is_among_those_that_are_shown(id, function):
    mutant = MUTANTS[id]
    machine = MACHINES[mutant.machine]
    with mutant.active():
        program = found(machine)
        with silence():
            assert function in suspects_text(machine, program)
