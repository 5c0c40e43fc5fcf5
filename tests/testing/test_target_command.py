"""`trioengine fuzz --target`: its refusals, its exit codes, and the files that it writes."""

import json
import subprocess
import sys
import threading
from xml.etree import ElementTree

import pytest
import trio
from helpers.faulty_servers import FaultyServer, StaleCache

from trioengine.cli import fuzz_target
from trioengine.cli.app import run

FIRST = ["--minutes", "0.0001", "--seed", "160"]  # one program, in which the weights are updated


@pytest.fixture
def serving():
    """A function that serves a fake in a thread and returns its URL."""
    threads = []

    def serve(kind):
        ready, server = threading.Event(), kind()

        async def main():
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve)
                stop = trio.Event()
                threads.append((thread, trio.lowlevel.current_trio_token(), stop))
                ready.set()
                await stop.wait()
                nursery.cancel_scope.cancel()

        thread = threading.Thread(target=trio.run, args=(main,))
        thread.start()
        assert ready.wait(10)
        return f"http://127.0.0.1:{server.port}/v1"

    yield serve
    for thread, token, stop in threads:
        token.run_sync_soon(stop.set)
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--minutes", "1"], "--minutes is for --target"),
        (["--report", "x.html"], "--report is for --target"),
        (["--i-own-this-server"], "--i-own-this-server is for --target"),
        (["--target", "http://127.0.0.1:1", "--examples", "3"], "--examples does not go with --target"),
        (["--target", "http://192.0.2.1:8000"], "--i-own-this-server"),
        (["--target", "http://example.com"], "--i-own-this-server"),
        (["--target", "localhost:8000"], "must be a URL"),
        (["--target", "https://127.0.0.1"], "must be a URL"),
        (["--target", "http://127.0.0.1:99999"], "--target"),
        (["--target", "http://127.0.0.1:1", "--dialect", "ollama"], "--dialect must be one of openai"),
        (["--target", "http://127.0.0.1:1", "--minutes", "0"], "--minutes must be more than 0"),
        (["--target", "http://127.0.0.1:1", "--pid", "99999999"], "no such process"),
        (["--target", "http://127.0.0.1:1", "--report", "/no/such/place.html"], "no such directory"),
        (["--target", "http://127.0.0.1:1", "--replay", "/no/such/file"], "No such file"),
        (["--target", "http://127.0.0.1:1"], "127.0.0.1:1 does not answer"),
    ],
)
def test_usage_errors(arguments, complaint, capsys):
    assert run(["fuzz", *arguments]) == 2
    output = capsys.readouterr()
    assert complaint in output.err and output.err.count("\n") == 1 and not output.out


def test_nothing_found(serving, tmp_path, capsys):
    keep = tmp_path / "found.json"
    assert run(["fuzz", "--target", serving(FaultyServer), "--minutes", "0.01", "--keep", str(keep)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("nothing found: ") and "dialect sglang (detected)" in output.err
    assert not keep.exists()


def test_a_finding_is_kept_and_replayed(serving, tmp_path, capsys):
    url, keep, report = serving(StaleCache), tmp_path / "found.json", tmp_path / "report.html"
    command = ["fuzz", "--target", url, "--api-key", "secret-key"]
    assert run([*command, *FIRST, "--keep", str(keep), "--report", str(report)]) == 1
    output = capsys.readouterr().out
    assert output.startswith("1 finding: ") and "cached: the first answer after update" in output
    assert f"--replay {keep}" in output
    kept = json.loads(keep.read_text())
    assert kept["oracle"] == "cached" and kept["rate"] == [5, 5] and kept["evidence"]["before"]
    ElementTree.fromstring(keep.with_suffix(".svg").read_text())
    ElementTree.fromstring(report.read_text().removeprefix("<!DOCTYPE html>"))
    for path in tmp_path.iterdir():
        assert "secret-key" not in path.read_text()
    subprocess.run(["/bin/sh", "-n", str(keep.with_suffix(".sh"))], check=True)
    script = subprocess.run([sys.executable, str(keep.with_suffix(".py"))], check=False, stdout=subprocess.PIPE)
    assert script.returncode == 1
    assert run([*command, "--replay", str(keep)]) == 1
    assert capsys.readouterr().out.startswith("5 of 5 runs failed: cached: ")
    assert run(["fuzz", "--target", serving(FaultyServer), "--replay", str(keep)]) == 0
    assert capsys.readouterr().out.startswith("0 of 5 runs failed")


def test_a_failure_of_the_fuzzer_has_its_own_exit_code(serving, capsys, monkeypatch):
    def fail(target):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(fuzz_target, "detect", fail)
    assert run(["fuzz", "--target", serving(FaultyServer)]) == 3
    assert "the fuzzer failed: ZeroDivisionError: planted" in capsys.readouterr().err
