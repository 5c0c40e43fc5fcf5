"""The lines of a user's program that the fuzzer does not reach."""

import inspect

from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.unreached import unreached_text


class Desk(LifecycleMachine):
    def __init__(self):
        super().__init__()
        self.is_open = True

    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=3)
        if completion.text == "no answer of the toy model's":
            await engine.ask("again")
            await engine.ask("and again")
        self.close_desk()

    def close_desk(self):
        self.is_open = False

    def never_called(self):
        return "no"


def test_lines_are_named_with_their_functions():
    lines = unreached_text(Desk).splitlines()
    branch = inspect.getsourcelines(Desk.app)[1] + 3
    assert lines[0] == "lines of your program that 60 programs do not reach:"
    (line,) = lines[1:]
    assert line.startswith("  tests/testing/test_unreached.py: ")
    assert f"{branch}-{branch + 1} Desk.app" in line and "Desk.never_called" in line
    assert "Desk.close_desk" not in line and "__init__" not in line and line.count("Desk.app") == 1


def test_machines_of_the_package_have_none():
    assert unreached_text(EngineMachine) == ""
