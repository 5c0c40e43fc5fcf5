"""The fuzzer by URL re-finds published bugs in servers that have them, and nothing in servers that do not."""

import json
import random
import sys
from functools import partial
from xml.etree import ElementTree

import pytest
import trio
from helpers.faulty_servers import (
    PAUSE,
    AbortByPrefix,
    AbortHitsAnother,
    AnotherConversation,
    CrashByAbort,
    FaultyServer,
    FilesKept,
    GarbageAfterWake,
    GaugeDrift,
    HeldForever,
    LeakAfterDisconnect,
    Pauser,
    Sleeper,
    StaleCache,
    StateStuck,
    StuckAfterAborts,
)
from helpers.memory_driver import MemoryDriver
from trio._core import _run
from trio.testing import MockClock

from trioengine.testing.target.artifacts import curl_lines, page, schedule_svg, script
from trioengine.testing.target.calibrate import PATIENCE, NoTarget, calibrate, detect
from trioengine.testing.target.dialects import LLAMA_CPP, OPENAI
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Event, Target
from trioengine.testing.target.hunt import Found, Hunt, program_of
from trioengine.testing.target.oracles import Finding, check_process
from trioengine.testing.target.program import RULES, Step, draw, step_from
from trioengine.testing.target.wire import (
    Close,
    Connect,
    End,
    Leave,
    Receive,
    Response,
    Send,
    answer_of,
)


@pytest.fixture
def seeded(monkeypatch):
    """Draw trio's order of tasks from a seed, so that each run of a test is the same."""
    monkeypatch.setattr(_run, "_r", random.Random(1))


async def calibrated(driver):
    target = Target("memory:80", "", OPENAI)
    target.dialect = await driver.run(detect(target))
    return await driver.run(calibrate(target))


async def hunting(kind, nursery, seed=0):
    """Return a hunt on a fake; before each replay another one takes its place, as after a restart."""
    driver = MemoryDriver(kind(), nursery)

    async def fresh():
        driver.server = kind()

    return Hunt(driver, await calibrated(driver), seed=seed, fresh=fresh, longest=6)


async def searched(kind, programs, seed=1):
    async with trio.open_nursery() as nursery:
        hunt = await hunting(kind, nursery, seed)
        while hunt.outcome.programs < programs and not hunt.outcome.found:
            await hunt.search(programs=hunt.outcome.programs + 1)
        nursery.cancel_scope.cancel()
    return hunt


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
async def test_a_published_bug_is_found_again(kind, seeded, autojump_clock):
    oracles, seed = BUGS[kind]
    (found,) = (await searched(kind, 300, seed=seed)).outcome.found
    assert found.finding.oracle in oracles, found.finding
    assert found.failed >= 4 and found.replays == 5
    assert len(found.steps) <= 5, found.steps


@pytest.mark.parametrize("kind", [FaultyServer, Sleeper, Pauser])
async def test_a_server_without_a_bug_has_no_finding(kind, seeded, autojump_clock):
    outcome = (await searched(kind, 50)).outcome
    assert outcome.found == [] and outcome.programs == 50


async def test_a_process_that_keeps_files_is_searched_on(seeded, autojump_clock):
    async with trio.open_nursery() as nursery:
        driver = MemoryDriver(FilesKept(), nursery)
        hunt = Hunt(driver, await calibrated(driver), seed=1, longest=6)  # nothing starts the server again
        outcome = await hunt.search(programs=30)
        nursery.cancel_scope.cancel()
    (found,) = outcome.found
    assert found.finding.oracle == "process" and outcome.programs == 30
    assert found.recovered and found.failed >= 4 and found.replays == 5
    assert len(found.steps) <= 2, found.steps


async def test_a_queued_client_that_leaves_aborts_another(seeded, autojump_clock):
    opened = Step("open", {"client": 1, "stream": True, "max_tokens": 64, "words": 0, "golden": False})
    burst = Step("burst", {"count": 8, "chunks": 0, "how": "fin", "words": 0})
    async with trio.open_nursery() as nursery:
        run, finding = await (await hunting(AbortHitsAnother, nursery)).run([opened, burst])
        nursery.cancel_scope.cancel()
    assert finding is not None and finding.oracle == "whole" and "client 1" in finding.message
    assert any(event.text == "closes (fin)" for event in run.log)


async def run_script(path, server):
    """Run a finding's script on a fake that listens on loopback."""
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        command = [sys.executable, "-I", "-S", str(path), f"127.0.0.1:{server.port}"]
        done = await trio.run_process(command, check=False, capture_stdout=True, capture_stderr=True)
        nursery.cancel_scope.cancel()
    return done


SLOW = 0.1  # seconds for a token: the client leaves in the middle of an answer


@pytest.mark.parametrize(("kind", "times", "pause"), [(LeakAfterDisconnect, 1, SLOW), (StaleCache, 5, PAUSE)])
def test_the_script_reproduces_the_finding(kind, times, pause, seeded, tmp_path):
    hunt = trio.run(searched, kind, 300, BUGS[kind][1], clock=MockClock(autojump_threshold=0))
    (path := tmp_path / "finding.py").write_text(script(hunt.outcome.found[0], hunt.target))
    for _ in range(times):
        done = trio.run(run_script, path, kind(pause))
        assert done.returncode == 1 and done.stdout.endswith(b"\nreproduced\n"), (done.stdout, done.stderr)
    done = trio.run(run_script, path, FaultyServer())
    assert done.returncode == 0 and b"not reproduced" in done.stdout, (done.stdout, done.stderr)


async def test_the_driver_closes_a_connection_in_three_ways():
    ends = trio.open_memory_channel(3)

    async def answer(stream):
        try:
            await stream.receive_some()
            assert await stream.receive_some() == b""
            await stream.send_all(b"late")
            ends[0].send_nowait("eof")
        except trio.BrokenResourceError:
            ends[0].send_nowait("reset")

    def client(how):
        assert (yield Connect(1)) and (yield Send(1, b"hello", 10))
        yield Leave(1, how)
        received = (yield Receive(1, 10)), (yield Receive(1, 10))
        yield Leave(1, Close.FIN)
        return received

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        driver = TrioDriver("127.0.0.1", listener.socket.getsockname()[1])
        for how, end, received in (
            (Close.FIN, "eof", (End.CLOSED, End.CLOSED)),
            (Close.HALF, "eof", (b"late", End.CLOSED)),
            (Close.RST, "reset", (End.CLOSED, End.CLOSED)),
        ):
            assert await driver.run(client(how)) == received
            assert await ends[1].receive() == end
        nursery.cancel_scope.cancel()


async def test_the_artifacts_are_well_formed(autojump_clock):
    async with trio.open_nursery() as nursery:
        target = await calibrated(MemoryDriver(LeakAfterDisconnect(), nursery))
        nursery.cancel_scope.cancel()
    target.model = "<script>&"
    steps = [Step("close", {"client": 1, "how": "rst"}), Step("wait", {"milliseconds": 10})]
    log = [Event(0.0, "1", True, "<b>"), Event(0.5, "operator", False, "200 & more")]
    found = Found(Finding("rest", "<script>alert(1)</script>"), steps, "tag", 1, log=log)
    assert ElementTree.fromstring(schedule_svg(log)).tag.endswith("svg")
    text = page("1 finding", [found], target)
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not list(tree.iter("script")) and "reproduce(" in "".join(tree.itertext())
    assert program_of(found.to_json(target))[1] == steps
    assert any(line.startswith("curl ") for line in curl_lines(found, target))


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


class LoadingServer(FaultyServer):
    """A server that answers with 503 for a minute."""

    async def answer(self, stream, path, body):
        if trio.current_time() < self.loaded_at:
            await self.send(stream, 503, {"error": {"message": "loading the model"}})
        else:
            await super().answer(stream, path, body)


@pytest.mark.parametrize("seconds", [60.0, 600.0])
async def test_a_server_that_loads_its_model_is_waited_for(seconds, autojump_clock):
    server = LoadingServer()
    server.loaded_at = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        driver = MemoryDriver(server, nursery)
        if seconds < PATIENCE:
            target = await calibrated(driver)
            assert (target.dialect.name, target.model) == ("sglang", "fake")
        else:
            begin = trio.current_time()
            with pytest.raises(NoTarget, match="503"):
                await calibrated(driver)
            assert trio.current_time() - begin < PATIENCE + 5.0
        nursery.cancel_scope.cancel()


class SlowServer(FaultyServer):
    """A server that takes 20 ms for each word of a prompt."""

    async def generate(self, stream, prompt, limit, streamed):
        await trio.sleep(0.02 * len(prompt.split()))
        await super().generate(stream, prompt, limit, streamed)


@pytest.mark.parametrize(
    ("server", "words", "max_tokens"),
    [(FaultyServer(), 200, 64), (FaultyServer(0.1), 200, 8), (SlowServer(), 30, 64)],
)
async def test_requests_to_a_slow_server_are_small(server, words, max_tokens, seeded, autojump_clock):
    async with trio.open_nursery() as nursery:
        target = await calibrated(MemoryDriver(server, nursery))
        nursery.cancel_scope.cancel()
    chooser = random.Random(1)
    steps = [step for _ in range(200) for step in draw(chooser, ["open"], 12, target.most)]
    assert max(step.args["words"] for step in steps) == words
    assert max(step.args["max_tokens"] for step in steps) == max_tokens


def test_a_prompt_cache_in_memory_is_permitted_where_it_is_the_default():
    first, now = (365 << 20, 30), (2043 << 20, 30)
    assert [each.oracle for each in check_process(first, now, OPENAI.memory_may)] == ["process"]
    assert check_process(first, now, LLAMA_CPP.memory_may) == []
    assert check_process(first, (40 << 30, 30), LLAMA_CPP.memory_may)
