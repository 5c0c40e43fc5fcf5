"""The fuzzer by URL re-finds published bugs in servers that have them, and nothing in servers that do not."""

import json
import random
import sys
from xml.etree import ElementTree

import pytest
import trio
from helpers.faulty_servers import (
    AbortByPrefix,
    AbortHitsAnother,
    AnotherConversation,
    CrashByAbort,
    FaultyServer,
    GarbageAfterWake,
    GaugeDrift,
    HeldForever,
    LeakAfterDisconnect,
    Sleeper,
    StaleCache,
    StateStuck,
    StuckAfterAborts,
)

from trioengine.testing.target.artifacts import curl_lines, page, schedule_svg, script
from trioengine.testing.target.calibrate import calibrate, detect
from trioengine.testing.target.dialects import OPENAI
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Event, Target
from trioengine.testing.target.hunt import Found, Hunt, program_of
from trioengine.testing.target.oracles import Finding
from trioengine.testing.target.program import RULES, Step, draw, step_from
from trioengine.testing.target.wire import Response, answer_of

DEADLINE = 0.2  # seconds; the fakes answer in milliseconds


class Served:
    """A fake that can be replaced by a new one, at the same address for its clients."""

    def __init__(self, kind, nursery):
        self.kind, self.nursery = kind, nursery

    async def start(self, deadline):
        self.server = await self.nursery.start(self.kind().serve)
        self.driver = TrioDriver("127.0.0.1", self.server.port)
        target = Target(f"127.0.0.1:{self.server.port}", "", OPENAI)
        target.dialect = await self.driver.run(detect(target))
        self.target = await self.driver.run(calibrate(target))
        self.target.deadline = self.target.call_deadline = deadline
        return self

    async def fresh(self):
        """Replace the server, as a restart does."""
        server = await self.nursery.start(self.kind().serve)
        self.port = server.port
        self.driver._address = ("127.0.0.1", server.port)


async def searched(kind, programs, deadline=DEADLINE, seed=1):
    async with trio.open_nursery() as nursery:
        served = await Served(kind, nursery).start(deadline)
        hunt = Hunt(served.driver, served.target, seed=seed, fresh=served.fresh, longest=6)
        for _ in range(programs):
            outcome = await hunt.search(programs=hunt.outcome.programs + 1)
            if outcome.found:
                break
        nursery.cancel_scope.cancel()
    return outcome


BUGS = {  # the oracles that may find it, and a seed with which that is soon
    LeakAfterDisconnect: ({"rest"}, 4),
    StuckAfterAborts: ({"probe"}, 4),
    AbortByPrefix: ({"whole"}, 2),
    AnotherConversation: ({"golden", "marker"}, 1),
    StaleCache: ({"cached"}, 1),
    GaugeDrift: ({"rest"}, 4),
    CrashByAbort: ({"probe"}, 1),
    GarbageAfterWake: ({"golden"}, 1),
    HeldForever: ({"whole"}, 2),
    StateStuck: ({"state"}, 1),
}


@pytest.mark.parametrize("kind", BUGS, ids=lambda kind: kind.__name__)
async def test_a_published_bug_is_found_again(kind):
    oracles, seed = BUGS[kind]
    outcome = await searched(kind, 300, seed=seed)
    (found,) = outcome.found
    assert found.finding.oracle in oracles, found.finding
    assert found.failed >= 4 and found.replays == 5
    assert len(found.steps) <= 5, found.steps


@pytest.mark.parametrize("kind", [FaultyServer, Sleeper])
async def test_a_server_without_a_bug_has_no_finding(kind):
    outcome = await searched(kind, 25, deadline=10.0)
    assert outcome.found == [] and outcome.programs == 25


async def test_a_queued_client_that_leaves_aborts_another():
    opened = Step("open", {"client": 1, "stream": True, "max_tokens": 64, "words": 0, "golden": False})
    burst = Step("burst", {"count": 8, "chunks": 0, "how": "fin", "words": 0})
    async with trio.open_nursery() as nursery:
        served = await Served(AbortHitsAnother, nursery).start(DEADLINE)
        run, finding = await Hunt(served.driver, served.target).run([opened, burst])
        nursery.cancel_scope.cancel()
    assert finding is not None and finding.oracle == "whole" and "client 1" in finding.message
    assert any(event.text == "closes (fin)" for event in run.log)


@pytest.mark.parametrize("kind", [LeakAfterDisconnect, StaleCache])
async def test_the_script_reproduces_the_finding(kind, tmp_path):
    async with trio.open_nursery() as nursery:
        served = await Served(kind, nursery).start(DEADLINE)
        hunt = Hunt(served.driver, served.target, seed=BUGS[kind][1], fresh=served.fresh, longest=6)
        while not hunt.outcome.found:
            await hunt.search(programs=hunt.outcome.programs + 1)
        (path := tmp_path / "finding.py").write_text(script(hunt.outcome.found[0], served.target))
        for _ in range(5):
            await served.fresh()
            command = [sys.executable, "-I", "-S", str(path), f"127.0.0.1:{served.port}"]
            done = await trio.run_process(command, check=False, capture_stdout=True, capture_stderr=True)
            assert done.returncode == 1 and b"not reproduced" not in done.stdout, (done.stdout, done.stderr)
        healthy = await nursery.start(FaultyServer().serve)
        command[-1] = f"127.0.0.1:{healthy.port}"
        done = await trio.run_process(command, check=False, capture_stdout=True)
        assert done.returncode == 0 and b"not reproduced" in done.stdout
        nursery.cancel_scope.cancel()


async def test_the_artifacts_are_well_formed():
    async with trio.open_nursery() as nursery:
        served = await Served(LeakAfterDisconnect, nursery).start(DEADLINE)
        served.target.model = "<script>&"
        steps = [Step("close", {"client": 1, "how": "rst"}), Step("wait", {"milliseconds": 10})]
        log = [Event(0.0, "1", True, "<b>"), Event(0.5, "operator", False, "200 & more")]
        found = Found(Finding("rest", "<script>alert(1)</script>"), steps, "tag", 1, log=log)
        nursery.cancel_scope.cancel()
    assert ElementTree.fromstring(schedule_svg(log)).tag.endswith("svg")
    text = page("1 finding", [found], served.target)
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not list(tree.iter("script")) and "reproduce(" in "".join(tree.itertext())
    assert program_of(found.to_json(served.target))[1] == steps
    assert any(line.startswith("curl ") for line in curl_lines(found, served.target))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"format": 1}',
        '{"format": 1, "steps": [["no rule", {}]]}',
        '{"format": 1, "steps": [["wait", {}]]}',
        '{"format": 1, "steps": [["wait", {"milliseconds": 1e9}]]}',
        '{"format": 1, "steps": [["abort_all", {"more": 1}]]}',
    ],
)
def test_a_bad_file_is_refused(text):
    with pytest.raises(ValueError, match=r"not a|step"):
        program_of(text)


def test_the_same_seed_draws_the_same_programs():
    first, second = (draw(random.Random(7), list(RULES), 12) for _ in range(2))
    assert first == second
    assert [step_from(json.loads(json.dumps([step.rule, step.args]))) for step in first] == first


def test_a_response_is_read_from_any_pieces():
    events = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    data = head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (events[:30], events[30:])) + b"0\r\n\r\n"
    response = Response()
    for at in range(len(data)):
        assert not response.ended or at > len(data) - 6
        response.feed(data[at : at + 1])
    answer = answer_of(response)
    assert response.ended and answer.text == "a" and answer.finish_reason == "stop" and answer.done
