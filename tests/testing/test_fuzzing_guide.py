"""The machines of the guide find nothing in its programs, and the bugs that are put into these."""

import re
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import run_state_machine_as_test

from trioengine.testing import toy_answer
from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.machine import Finding
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence

GUIDE = Path(__file__).parents[2] / "docs" / "fuzzing-your-code.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def machine_of(name, old="", new=""):
    """The machine of the guide, with a piece of the program replaced."""
    (block,) = [block for block in BLOCKS if f"class {name}(" in block]
    assert old in block
    names = {"__name__": "guide"}
    exec(block.replace(old, new) if old else block, names)
    return names[name]


def fuzzed(machine, examples):
    with silence():
        return Fuzzer(machine, PROFILES["quick"], 0).run(examples=examples)


@pytest.mark.parametrize("name", ["ChatMachine", "LinesMachine", "JobsMachine"])
def test_the_programs_have_no_findings(name):
    report = fuzzed(machine_of(name), 300)
    assert report.failure is None, f"{report.failure}\n{report.program}"


ENDS = "asleep|draining|closed|restarting"
SEND = 'await stream.send_all(f"{completion.text}\\n".encode())'
TWICE = f"{SEND}\n                if completion.cause:\n                    {SEND}"
BUGS = {
    "an answer is sent twice": ("LinesMachine", SEND, TWICE, "an answer too many"),
    "an error ends the server": ("LinesMachine", "(EngineError, trio.", "(trio.", ENDS),
    "a cancelled worker wakes nobody": ("JobsMachine", "            finally:\n", "            else:\n", "wait forever"),
    "an error ends all workers": (
        "JobsMachine",
        "except EngineError as",
        "except TypeError as",
        ENDS,
    ),
}


@pytest.mark.parametrize(("name", "old", "new", "failure"), BUGS.values(), ids=BUGS)
def test_bugs_are_found(name, old, new, failure):
    report = fuzzed(machine_of(name, old, new), 3000)
    assert re.search(failure, str(report.failure)), f"{report.failure!r}\n{report.program}"


def test_hypothesis_keeps_and_replays_a_failure():
    """In its own database, from its own choices."""
    machine = machine_of("LinesMachine", "except (EngineError, trio.", "except (trio.")
    database, made = InMemoryExampleDatabase(), []

    class Counted(machine):
        def __init__(self):
            super().__init__()
            made.append(self)

    chosen = settings(max_examples=300, stateful_step_count=20, deadline=None, database=database, print_blob=False)
    with silence():
        for _ in range(2):
            made.clear()
            with pytest.raises(Finding):
                run_state_machine_as_test(Counted, settings=chosen)
    assert database.data
    assert made[0].finding is not None, "the failure that was kept runs first"


def test_the_toy_models_answer_to_a_chat():
    (block,) = [block for block in BLOCKS if "toy_answer(prompt" in block]

    class Asks(LifecycleMachine):
        async def app(self, engine):
            completion = await engine.ask("to be", max_tokens=3)
            names = {"engine": engine, "toy_answer": toy_answer}
            exec(block, names)
            assert completion.finish_reason == "abort" or completion.text == names["text"], "another answer"

    assert fuzzed(Asks, 30).failure is None
