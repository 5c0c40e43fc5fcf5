"""The fuzzer: nothing in the engine, every bug put into it, every state that it used to reach, twice the same."""

import gc
import json
import os
import subprocess
import sys

import pytest
from mutants import MUTANTS

from trioengine.testing.fuzz import runner
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.machine import TABLE_STATES
from trioengine.testing.fuzz.machines import MACHINES, machine_named, machine_of
from trioengine.testing.fuzz.program import Program, ReplayFile, replay
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence

RUNS = {"EngineMachine": 700, "PowerMachine": 1000, "RealtimeMachine": 800, "HttpMachine": 400, "ClientMachine": 450}
LONGER = 4  # times as many programs, at most, until all states are reached
PROGRAMS_A_MUTANT = 3000
OUT_OF_REACH = frozenset(  # reached by one program in a thousand
    {
        "engine waking: left_alone",
        "session stopping, detaching: end",
        "session suspended, detaching: worker_lost",
        "session preparing, attached: worker_lost",
        "session stopping, detaching: session_ended",
        "session suspended, detaching: finish",
    }
)
MOMENTS = (
    "while it waits in line",
    "while it is prepared",
    "before the worker has seen ADD_SESSION",
    "after the outcome, before it is read",
)
WHILE_A_RESPONSE_IS_ACTIVE = frozenset(
    f"{how} while a response is active"
    for how in ("close", "hang up", "reset", "stall", "vanish", "read again", "garbage", "half-close")
)
MORE_THAN_THERE_IS_ROOM_FOR = frozenset({"a connection makes room", "the buffers are full"})
IMAGE_MOMENTS = (
    "while it waits for payload room",
    "while its images are sealed",
    "with its images pinned",
    "before its payloads are sent",
    "with payloads in the socket",
    "while it is parked",
)
OF_CALLS = frozenset({"a call is answered", "several calls are answered"})
REACHED = {
    "PowerMachine": TABLE_STATES - OUT_OF_REACH
    | {
        "a reader of the states missed some",
        "a resumed request resent its images",
        "sleep with a parked request",
        "kill in the arguments of a call, which goes on",
    },
    "EngineMachine": OF_CALLS
    | {
        *(f"{what} in the arguments of a call" for what in ("abort", "cancel", "end", "kill")),
        "abort behind a call",
        "abort in the head of a call",
        *(f"{what} {moment}" for what in ("abort", "cancel") for moment in MOMENTS),
        *(f"{what} {moment}" for what in ("abort", "cancel") for moment in IMAGE_MOMENTS),
        *(f"{what} crosses the finish" for what in ("abort", "cancel", "end")),
        *(f"{order} of a parked request" for order in ("STOP", "END")),
        "a history has no room for its pictures",
        "fail while it is prepared",
        "a history is replaced",
        "a history is replaced in the middle of a request",
        "a payload was dropped to make room",
        "a picture came from the encoder cache",
        "a picture was shared by two requests",
        "a request waited for payload room",
        "a turn needs an image that was dropped",
        "a worker died with payloads in the socket",
        "an image could not be sealed",
        "a worker dies with bytes on their way to it",
        "a worker's last frame is torn",
        "all are aborted, some in preparation and some in line",
        "an image failed after its request was stopped",
        "an image failed its request",
        "images are larger than the whole budget",
        "messages and token ids are mixed",
        "num preemptions",
        "prefix cache hits",
        "accepted tokens",
        "token ids are replaced by a history",
    },
    "RealtimeMachine": WHILE_A_RESPONSE_IS_ACTIVE
    | MORE_THAN_THERE_IS_ROOM_FOR
    | {
        "END of a parked request",
        "a cancel crosses events of the server",
        "a payload was dropped to make room",
        "a request waited for payload room",
        "a turn needs an image that was dropped",
        "an image failed its request",
        "a message is dropped",
        "a response beside the conversation is cancelled",
        "a response is asked for right after a cancel",
        "an answer is truncated",
        "an outbox is full",
        *(f"{how}, and come back" for how in ("reset", "hang up", "vanish")),
        *(f"a client is refused: {code}" for code in ("session_not_found", "events_dropped")),
        "a connection is taken over",
        "a session is cut, as its client is away",
        "a window passes",
        "an event is sent again",
        "come back while a response is active",
    },
    "HttpMachine": WHILE_A_RESPONSE_IS_ACTIVE
    | MORE_THAN_THERE_IS_ROOM_FOR
    | {
        "END of a parked request",
        "an image could not be sealed",
        "an image failed its request",
        "an operator aborts a request",
        "images are larger than the whole budget",
    },
    "ClientMachine": WHILE_A_RESPONSE_IS_ACTIVE
    | MORE_THAN_THERE_IS_ROOM_FOR
    | OF_CALLS
    | {
        *(f"{what} in the arguments of a call" for what in ("abort", "cancel", "kill")),
        *(f"{how} a client with requests" for how in ("leave", "raise", "cancel", "dislike")),
        *(f"{how} a session with a request" for how in ("leave", "cancel", "end")),
        "a history is replaced in the middle of a request",
        "a resumed request resent its images",
        "a session is given up while its history is sent",
        "an outbox is full",
    },
}


@pytest.fixture(scope="module", params=RUNS)
def report(request):
    programs, reached = RUNS[request.param], REACHED[request.param]
    with silence():
        return Fuzzer(MACHINES[request.param], PROFILES["quick"], seed=0).run(
            examples=LONGER * programs,
            until=lambda report: report.programs >= programs and reached <= set(report.coverage),
        )


def test_nothing_is_found(report):
    assert report.failure is None, f"{report.failure!r}\n{report.program}"
    assert report.programs >= RUNS[report.machine]


def test_what_used_to_be_reached_is_reached(report):
    """Sometimes: the rows of the lifecycle tables, and the rare states that the machine names."""
    missed = REACHED[report.machine] - set(report.coverage)
    assert not missed, f"never reached: {sorted(missed)}"


def test_a_run_that_is_over_keeps_no_machine():
    """What is found holds the frames it went through, and so a whole engine; the table has hundreds of runs."""
    mutant = MUTANTS["F3"]
    with silence(), mutant.active():
        report = Fuzzer(MACHINES[mutant.machine], PROFILES["quick"], 0, shrink=False).run(seconds=60)
    assert report.failure is not None
    del report
    gc.collect()
    assert not [kept for kept in gc.get_objects() if issubclass(type(kept), MACHINES[mutant.machine])]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_each_mutant_is_found(mutant):
    """By one seed, for its own reason, and not shrunk; the same program without the mutant is harmless."""
    with silence(), mutant.active():
        report = Fuzzer(MACHINES[mutant.machine], PROFILES["quick"], 0, shrink=False).run(examples=PROGRAMS_A_MUTANT)
    assert report.failure is not None, f"{mutant.failure}: not found in {report.programs} programs"
    assert mutant.explains(report.failure), repr(report.failure)
    with silence():
        replay(MACHINES[mutant.machine](), ReplayFile.from_json(report.program.to_json()).program)


def run_python(script, text="", *args, **environment):
    """What a fresh process prints."""
    command, env = [sys.executable, "-c", script, *args], os.environ | environment
    return subprocess.run(command, input=text, env=env, capture_output=True, text=True, check=True).stdout


REPLAYS = """
import json, sys
from trioengine.testing.fuzz import runner
from trioengine.testing.fuzz.machines import MACHINES, machine_named, machine_of
from trioengine.testing.fuzz.program import ReplayFile, replay
checksums = {}
for text in json.load(sys.stdin):
    program = ReplayFile.from_json(text).program
    machine = MACHINES[program.machine]()
    replay(machine, program)
    checksums[program.machine] = machine.checksum
print(json.dumps(checksums))
"""


def test_a_replay_takes_the_same_steps_in_every_process():
    with silence():
        longest = [max(first_programs(machine, 8), key=length) for machine in MACHINES.values()]
    assert all(length(program) > 10 for program in longest)
    text = json.dumps([program.to_json() for program in longest])
    here = {}
    for program in longest:
        machine = MACHINES[program.machine]()
        with silence():
            replay(machine, program)
        here[program.machine] = machine.checksum
    for seed in ("0", "1", "4711"):
        assert json.loads(run_python(REPLAYS, text, PYTHONHASHSEED=seed)) == here


def length(program):
    return len(program.steps)


def first_programs(machine, count):
    """What a seed begins with."""
    programs = []

    class Kept(machine):
        def teardown(self):
            programs.append(self.program)
            super().teardown()

    Kept.__name__ = machine.__name__
    Fuzzer(Kept, PROFILES["quick"], seed=3).run(examples=count)
    return [ReplayFile.from_json(program.to_json()).program for program in programs]


PROGRAMS_OF_A_SEED = """
import hashlib, sys
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence
from trioengine.testing.fuzz import runner
from trioengine.testing.fuzz.machines import MACHINES, machine_named, machine_of
if sys.argv[1] == "more":
    import trioengine.cli, trioengine.serve, asyncio, http.server
    from hypothesis import given, strategies as st
    given(st.integers(0, 3))(lambda number: None)()
for machine in MACHINES.values():
    digests = []
    class Kept(machine):
        def __init__(self):
            super().__init__()
            self.record()
        def teardown(self):
            super().teardown()
            evidence = [self.program.to_json(), *self.trace.lines, self.checksum]
            digests.append(hashlib.sha256("\\n".join(evidence).encode()).hexdigest()[:8])
    with silence():
        report = Fuzzer(Kept, PROFILES["quick"], seed=7).run(examples=25)
    print(machine.__name__, report.programs, report.passes, digests, sorted(report.coverage.items()))
"""


def test_a_seed_gives_the_same_programs_and_traces_in_every_process():
    alone = run_python(PROGRAMS_OF_A_SEED, "", "little", CI="", PYTHONHASHSEED="0").splitlines()
    beside = run_python(PROGRAMS_OF_A_SEED, "", "more", CI="true", PYTHONHASHSEED="1").splitlines()
    assert alone == beside
    assert [(line.split()[0], int(line.split()[1]) >= 25) for line in alone] == [(name, True) for name in MACHINES]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no json", r"it is not JSON \(Expecting value.*\)"),
        (b"\xff", r"it is not JSON \('utf-8' codec.*\)"),
        ("[" * 100_000, r"it is not JSON \(.*recursion.*\)"),
        ("5", "it is not a JSON object"),
        ("{}", "it has no 'steps'"),
        (json.dumps({"steps": []}), "it has no 'machine'"),
        (json.dumps({"machine": 1, "steps": []}), "its machine must be a name"),
        *[
            (
                json.dumps({"machine": "x", "steps": steps}),
                "its steps must be lists of a rule and its arguments by name",
            )
            for steps in ({}, 5, [5], [["a"]], [["a", []]], [[1, {}]], [["a", {}, {}]])
        ],
    ],
)
def test_files_that_are_no_programs(text, complaint):
    with pytest.raises(ValueError, match=f"^no replay file: {complaint}$"):
        ReplayFile.from_json(text)


def test_unknown_rules_and_machines_are_named():
    with pytest.raises(ValueError, match="no rule 'fly'"):
        replay(EngineMachine(), Program("EngineMachine", [("fly", {})]))
    with pytest.raises(ValueError, match=r"no machine 'X'; there are engine, power, .*, module:Class"):
        machine_named("X")


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        *[
            ((name, {}), f"no rule '{name}'")
            for name in ("coverage", "passes", "teardown", "_settle", "check_invariants")
        ],
        (("act", {"rule": 5}), "no rule 'act'"),
        (("open", {}), "open takes wait, and is given nothing"),
        (("open", {"wait": True, "which": 0}), "open takes wait, and is given wait, which"),
        (("settle", {"wait": True}), "settle takes nothing, and is given wait"),
        (("open", {"wait": 1}), r"open cannot be given wait=1, but booleans\(\)"),
        (("outage", {"way": "no such outage"}), "outage cannot be given way='no such outage'"),
        (("advance", {"seconds": -5.0}), "advance cannot be given seconds=-5.0"),
        (("tick", {"passes": 0, "order": 0}), "tick cannot be given passes=0"),
        (("flow", {"rounds": 10**9}), "flow cannot be given rounds=1000000000"),
        (("flow", {"rounds": "x"}), "flow cannot be given rounds='x'"),
        (("flow", {"rounds": True}), "flow cannot be given rounds=True"),
        (("flow", {"rounds": "1"}), "flow cannot be given rounds='1'"),
        (("ask", {"which": 0, "max_tokens": True, "reads": True}), "ask cannot be given max_tokens=True"),
        (("outage", {"way": ["drain"]}), "outage cannot be given way="),
    ],
)
def test_what_is_no_step_is_refused_before_anything_runs(step, complaint):
    machine = EngineMachine()
    with pytest.raises(ValueError, match=f"^step 2: .*{complaint}"):
        replay(machine, Program("EngineMachine", [("settle", {}), step]))
    assert not machine.program.steps
    assert machine.engine_call.over, "its teardown has run"


def test_a_refused_program_hides_nothing_behind_its_teardown():
    machine = EngineMachine()
    machine.loop.crashes.append(KeyError("found in the end"))
    with pytest.raises(ValueError, match="no rule 'fly'"):
        replay(machine, Program("EngineMachine", [("fly", {})]))
    assert machine.finding is not None


def test_a_step_whose_precondition_does_not_hold_is_skipped():
    steps = [("ask", {"which": 0, "max_tokens": 1, "reads": True}), ("open", {"wait": True}), ("settle", {})]
    machine = EngineMachine()
    assert replay(machine, Program("EngineMachine", [*steps, steps[0], ("leave", {"which": 0, "what": "end"})])) == 1
    assert [name for name, _ in machine.program.steps] == ["open", "settle", "ask", "leave"]


def test_a_program_reads_as_code():
    program = Program("EngineMachine", [("begin", {"ready": True, "sessions": 1}), ("settle", {})])
    assert str(program).splitlines() == [
        "machine = EngineMachine()",
        "machine.begin(ready=True, sessions=1)",
        "machine.settle()",
        "machine.teardown()",
    ]
    assert program.length == 1


def test_batches_run_with_each_configuration_in_turn(monkeypatch):
    seen = []

    class Noted(EngineMachine):
        def __init__(self):
            super().__init__()
            seen.append((self.variant, self.engine.config.max_num_seqs, self.simulation.limits.max_num_seqs))

    monkeypatch.setattr(runner, "BATCH", 5)
    with silence():
        Fuzzer(Noted, PROFILES["quick"], 0).run(examples=15)
    assert sorted(set(seen)) == [(0, 2, 2), (1, 1, 1), (2, 4, 4)]


def test_a_replay_has_the_configuration_of_its_program():
    program = Program("EngineMachine", [("settle", {})], variant=1)
    assert "machine = EngineMachine.with_variant(1)()" in str(program)
    kept = ReplayFile.from_json(program.to_json()).program
    assert kept == program
    machine = machine_of(kept)()
    replay(machine, kept)
    assert machine.engine.config.max_num_seqs == 1 and machine.program.variant == 1
    with pytest.raises(ValueError, match="EngineMachine has 4 variants, and none with the number 4"):
        machine_of(Program("EngineMachine", variant=4))
    with pytest.raises(ValueError, match="its variant must be a number"):
        ReplayFile.from_json(json.dumps({"machine": "EngineMachine", "steps": [], "variant": "a"}))
