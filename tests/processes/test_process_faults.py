"""`trioengine fuzz --target process`: a real server and its worker survive every fault, and a bug is found."""

import os
import sys
from pathlib import Path

from helpers import faulty_serving

from trioengine.cli.fuzz_process import with_model
from trioengine.testing.target.dialects import TRIOENGINE
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.faults import FaultyRun
from trioengine.testing.target.hunt import Hunt
from trioengine.testing.target.program import FAULTS, Step
from trioengine.testing.target.server_process import command_line, started

OPEN = ("open", {"client": 0, "stream": True, "max_tokens": 64, "words": 0, "golden": False})
WHOLE = ("open", {"client": 1, "stream": False, "max_tokens": 8, "words": 30, "golden": False})
KILL = ("kill", {"process": "worker"})
PROGRAMS = {
    "a worker dies, twice, and the server has no descriptor left": [
        OPEN,
        ("pipes", {"way": "slow"}),
        ("freeze", {"process": "server", "milliseconds": 100}),
        KILL,
        WHOLE,
        ("pipes", {"way": "bytes"}),
        ("crowd", {"spare": 0, "count": 4, "kill": True}),
    ],
    "a worker hangs, and the next one has no memory": [
        OPEN,
        WHOLE,
        ("freeze", {"process": "relay", "milliseconds": 5000}),
        ("pipes", {"way": "lumps"}),
        ("starve", {"process": "worker", "megabytes": 0}),
    ],
    "the server ends at SIGTERM": [OPEN, WHOLE, ("terminate", {}), OPEN],
    "the server is killed": [OPEN, WHOLE, ("kill", {"process": "server"}), WHOLE],
}


def steps_of(program):
    return [Step(rule, args) for rule, args in program]


async def hunting(server):
    return Hunt(server, await server.measured(), fresh=server.restart, make_run=FaultyRun, faults=FAULTS)


def unmeasured(server, model, **deadlines):
    target = Target(server.address, "", TRIOENGINE, model, **deadlines)
    return Hunt(server, target, make_run=FaultyRun, faults=FAULTS)


async def test_a_server_survives_every_fault(smollm2):
    used = set()
    async with started(command_line(with_model((str(smollm2), "--startup-timeout", "40")))) as server:
        hunt = await hunting(server)
        assert hunt.target.slack > 40  # one start may hang, for lack of memory
        for name, program in PROGRAMS.items():
            run, finding = await hunt.run(steps_of(program))
            assert finding is None, (name, run.findings, run.log, run.evidence)
            used |= {rule for rule, _ in program}
            assert sum(event.client == "fault" for event in run.log) >= 2, run.log
        children = list(server.children.values())
    assert used >= set(FAULTS)
    for child in children:
        assert not is_running(child.pid)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_the_descriptors_of_a_look_are_counted_without_its_own_connection():
    target = Target(("127.0.0.1", 1), "", TRIOENGINE, "model")
    operations = FaultyRun(target, [], "1").snapshot()
    names = [type(next(operations)).__name__]
    while names[-1] != "Connect":
        names.append(type(operations.send(None)).__name__)
    assert names == ["Wait", "Figures", "Connect"]


async def test_descriptors_that_are_kept_are_found(smollm2):
    """A server that keeps the descriptors of a dead worker."""
    launcher = (sys.executable, faulty_serving.__file__, "keep_descriptors", "serve")
    async with started(command_line(with_model((str(smollm2),)), launcher)) as server:
        hunt = unmeasured(server, smollm2.name, deadline=61.0, slack=60.0)  # one second for the return to rest
        run, finding = await hunt.run(steps_of([KILL]))
    assert finding is not None and finding.oracle == "rest", run.findings
    assert "descriptors of the server" in finding.message


async def test_a_worker_whose_death_is_missed_is_found(smollm2):
    """A server that waits endlessly for the end of a dead worker answers no request."""
    launcher = (sys.executable, faulty_serving.__file__, "miss_the_death", "serve")
    async with started(command_line(with_model((str(smollm2),)), launcher)) as server:
        hunt = unmeasured(server, smollm2.name, deadline=3.0, call_deadline=3.0)
        _, finding = await hunt.run(steps_of([KILL]))
    assert finding is not None and finding.oracle == "probe", finding
