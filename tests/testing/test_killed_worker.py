"""`trioengine fuzz --target URL --pid PID --kill-worker`: a server has to replace its worker."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import trio
from helpers import forking_server
from helpers.faulty_servers import FaultyServer
from helpers.memory_driver import MemoryDriver

from trioengine.cli.app import run
from trioengine.testing.target.artifacts import script
from trioengine.testing.target.calibrate import NoTarget, calibrate, measure_start
from trioengine.testing.target.dialects import SGLANG
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.hunt import Found, Hunt
from trioengine.testing.target.processes import worker_of
from trioengine.testing.target.program import Step

KILL = Step("kill_worker")
PROGRAM = [
    Step("open", {"client": 0, "stream": True, "max_tokens": 64, "words": 0, "golden": False}),
    Step("open", {"client": 1, "stream": False, "max_tokens": 64, "words": 0, "golden": False}),
    KILL,
    KILL,
    Step("open", {"client": 2, "stream": True, "max_tokens": 8, "words": 0, "golden": False}),
    Step("abort", {"client": 2}),
    Step("bad", {"kind": "not json"}),
    Step("reset", {"variant": 0}),
    Step("open", {"client": 3, "stream": True, "max_tokens": 8, "words": 0, "golden": False}),
]


@pytest.fixture
def forking():
    """A function that starts a server with a worker, and returns its process and port."""
    started = []

    def start(*arguments):
        command = [sys.executable, forking_server.__file__, *arguments]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        started.append(process)
        return process.pid, int(process.stdout.readline())

    yield start
    for process in started:
        process.terminate()
        process.wait(10)
        process.stdout.close()


async def hunting(pid, port):
    driver = TrioDriver("127.0.0.1", port, pid)
    target = await driver.run(calibrate(Target(f"127.0.0.1:{port}", "", SGLANG)))
    return Hunt(driver, target)


async def test_a_server_that_replaces_its_worker_has_no_finding(forking):
    pid, port = forking()
    first = worker_of(pid)
    run, finding = await (await hunting(pid, port)).run(PROGRAM)
    assert finding is None, (run.findings, run.log)
    assert [event.text for event in run.log].count("SIGKILL of the worker") == 2
    assert first != worker_of(pid)
    assert [run.clients[number].excused for number in range(4)] == [True, True, True, False]


async def test_a_worker_that_is_not_replaced_is_found(forking, tmp_path):
    pid, port = forking("once")
    hunt = await hunting(pid, port)
    hunt.target.deadline = 0.5
    run, finding = await hunt.run([KILL])
    assert str(finding) == "probe: no completion was answered in 0.5 s after the death of the worker"
    found = Found(finding, [KILL], run.tag, 0)
    (path := tmp_path / "finding.py").write_text(script(found, hunt.target))
    assert last_line(path, *forking("once")) == "reproduced"
    path.write_text(script(found, replace(hunt.target, deadline=10.0)))
    assert last_line(path, *forking()) == "not reproduced"


async def test_a_server_must_replace_its_worker_before_the_search(autojump_clock):
    async with trio.open_nursery() as nursery:
        driver = MemoryDriver(FaultyServer(), nursery)
        target = await driver.run(calibrate(Target("memory:80", "", SGLANG)))
        await driver.run(measure_start(target))
        assert target.slack < 1 and target.deadline == 10 + target.slack
        driver.server.paused = trio.Event()
        with pytest.raises(NoTarget, match="no completion was answered in 120 s"):
            await driver.run(measure_start(target))
        nursery.cancel_scope.cancel()


def last_line(path, pid, port):
    command = [sys.executable, "-I", "-S", str(path), f"127.0.0.1:{port}", str(pid)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.splitlines()[-1]


@pytest.fixture
def finding(tmp_path):
    (path := tmp_path / "found.json").write_text(
        json.dumps({"format": 1, "dialect": "sglang", "steps": [[KILL.rule, {}]]})
    )
    return str(path)


def test_the_program_is_replayed(forking, finding, capsys):
    pid, port = forking()
    first = worker_of(pid)
    assert run(["fuzz", "--target", f"http://127.0.0.1:{port}", "--pid", str(pid), "--replay", finding]) == 0
    assert capsys.readouterr().out.startswith("0 of 5 runs failed") and worker_of(pid) != first


def test_the_search_kills_workers(forking, tmp_path):
    pid, port = forking()
    first = worker_of(pid)
    keep = ["--keep", str(tmp_path / "found.json"), "--minutes", "0.0001", "--seed", "91"]  # wait, open, kill_worker
    assert run(["fuzz", "--target", f"http://127.0.0.1:{port}", "--pid", str(pid), "--kill-worker", *keep]) == 0
    assert worker_of(pid) != first


def test_a_worker_is_needed(forking, finding, capsys):
    target = ["fuzz", "--target", "http://127.0.0.1:1"]
    pid, _ = forking()
    alone = ["--pid", str(worker_of(pid))]
    for arguments, complaint in (
        (["--kill-worker"], "--kill-worker needs --pid"),
        (["--kill-worker", *alone], "the process has no child"),
        (["--replay", finding], "has the step kill_worker, which needs --pid"),
        (["--replay", finding, *alone], "the process has no child"),
    ):
        assert run([*target, *arguments]) == 2
        assert complaint in capsys.readouterr().err
    assert run(["fuzz", "--target", "process", "--kill-worker"]) == 2
    assert "--kill-worker is for the URL of a server" in capsys.readouterr().err
