"""`trioengine bench serve` as a command: its output and files, on a loopback server."""

import json
import threading
from contextlib import contextmanager
from functools import partial
from xml.etree import ElementTree

import pytest
import trio
from helpers.scripted_server import ScriptedServer, answer, plain

from trioengine.cli.app import run


@contextmanager
def listening(*scripts):
    """A scripted server in a thread; its base URL."""
    started, told = threading.Event(), {}

    async def serve():
        async with trio.open_nursery() as nursery:
            server = ScriptedServer(nursery, *scripts)
            (listener,) = await nursery.start(partial(trio.serve_tcp, server._handle, 0, host="127.0.0.1"))
            told.update({"token": trio.lowlevel.current_trio_token(), "scope": nursery.cancel_scope})
            told["port"] = listener.socket.getsockname()[1]
            started.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{told['port']}"
    finally:
        told["token"].run_sync_soon(told["scope"].cancel)
        thread.join()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_json_and_files(tmp_path, monkeypatch, capsys, suffix):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))  # where no tokenizer is: prompts in words
    result, picture = tmp_path / "result.json", tmp_path / f"picture.{suffix}"
    with listening(answer(0, 0, 0)) as url:
        files = ["--save-result", str(result), "--plot", str(picture)]
        assert run(["bench", "serve", "--base-url", url, "--num-prompts", "3", "--json", *files]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads(result.read_text())
    assert (printed["completed"], printed["total_output_tokens"], printed["prompt_length_in"]) == (3, 9, "words")
    assert [request["output_tokens"] for request in saved.pop("requests")] == [3, 3, 3]
    assert saved == printed
    if suffix == "svg":
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_and_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))
    refused = plain(503, b'{"error": {"message": "\\u001b[2Jloading"}}')
    with listening(answer(0), answer(0), refused) as url:
        goals = ["--goodput", "ttft:60000", "e2el:60000"]
        assert run(["bench", "serve", "--base-url", url, "--num-prompts", "3", "--max-concurrency", "1", *goals]) == 1
    printed = capsys.readouterr()
    assert "requests failed" in printed.out
    assert "goodput" in printed.out
    assert printed.err == "trioengine: error: 2 requests failed: HTTP 503: \\x1b[2Jloading\n"


@pytest.mark.parametrize("option", ["--save-result", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_load(tmp_path, capsys, option):
    file = str(tmp_path / "absent" / "x.svg")
    assert run(["bench", "serve", option, file]) == 2
    assert f"error: {option} must be a file in a directory that exists, got {file!r}" in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("trioengine.cli.bench.report.importlib.util.find_spec", lambda name: None)
    assert run(["bench", "serve", "--plot", "x.svg"]) == 2
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
