"""Programs in which Realtime clients resume their sessions: they pass, and fail with a bug of a resumption."""

import pytest
from mutants import MUTANTS

from trioengine.testing.fuzz.machines import machine_of
from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.runner import replayed, silence


def come_back(how="reset", again=False, share=0.0, lacks=0, rounds=9):
    return "come_back", {"which": 0, "how": how, "again": again, "share": share, "lacks": lacks, "rounds": rounds}


def send(what):
    return "send", {"which": 0, "what": what}


BEGIN = ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 5})
ASK = ("ask", {"which": 0, "prompt": "a", "max_tokens": 20, "rounds": 9})
FLOW = ("flow", {"rounds": 8})
SETTLE = ("settle", {})
WAIT = ("advance", {"seconds": 11.0})
LOSE = ("go", {"which": 0, "how": "reset"})
PROGRAMS = {
    "in the middle of an answer": [BEGIN, ASK, FLOW, come_back(), SETTLE, come_back(lacks=4), SETTLE],
    "in time, twice": [BEGIN, ASK, FLOW, come_back(again=True, share=0.6), SETTLE],
    "beside the connection before": [BEGIN, ASK, FLOW, come_back("take over", rounds=0), FLOW, SETTLE],
    "two at once": [
        *(BEGIN, ASK, ("flow", {"rounds": 4})),
        *(come_back("take over", rounds=0), come_back("take over", lacks=1, rounds=0), send("say"), SETTLE),
    ],
    "too late": [BEGIN, ASK, FLOW, come_back(share=1.0, rounds=20), SETTLE],
    "a stranger": [BEGIN, come_back("strange"), SETTLE],
    "after a close": [BEGIN, SETTLE, ("go", {"which": 0, "how": "close"}), SETTLE, come_back(), SETTLE],
    "never": [BEGIN, LOSE, SETTLE],
    "after a sleep": [
        *(BEGIN, LOSE, SETTLE, ("connect", {}), SETTLE, send("say"), send("respond"), ("flow", {"rounds": 20})),
        *(("switch", {"how": "keep"}), SETTLE, come_back("hang up"), SETTLE),
    ],
    "with a cancel that is lost": [BEGIN, ASK, FLOW, send("cancel and respond"), come_back(), SETTLE],
    "with a part of a cancel": [
        *(BEGIN, ASK, FLOW, send("cancel and respond"), ("carry", {"which": 0, "to_server": 90, "to_client": 0})),
        *(come_back(), send("cancel and respond"), SETTLE),
    ],
    "for events that were dropped": [
        *(BEGIN, ASK, SETTLE, ASK, SETTLE, ASK, SETTLE, come_back(lacks=99), SETTLE, come_back(lacks=1), SETTLE),
    ],
    "after it has vanished": [BEGIN, ASK, come_back("vanish"), SETTLE, WAIT, SETTLE],
    "and is there when the window would have passed": [BEGIN, SETTLE, come_back(rounds=20), SETTLE, WAIT, SETTLE],
}
FOUND_BY = {
    "F86": "in the middle of an answer",
    "F86b": "after it has vanished",
    "F86c": "beside the connection before",
    "F87": "in time, twice",
    "F87b": "too late",
    "F87c": "and is there when the window would have passed",
    "F87d": "after a sleep",
    "F88": "in the middle of an answer",
}


def run(name):
    program = Program("RealtimeMachine", PROGRAMS[name])
    found = replayed(machine_of(program), program)
    assert found.machine.program.skipped == 0
    return found.failure


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name):
    with silence():
        assert run(name) is None


@pytest.mark.parametrize("id", FOUND_BY)
def test_a_mutant(id):
    with silence(), MUTANTS[id].active():
        failure = run(FOUND_BY[id])
    assert MUTANTS[id].explains(failure), failure
