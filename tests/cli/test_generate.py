"""Lines that are read from a pipe, and the answers that are written."""

import json
import os

import pytest

from trioengine import RequestRejected, SamplingParams
from trioengine.cli import chat
from trioengine.cli.chat import Lines, answer_lines
from trioengine.cli.generate import answer_prompt
from trioengine.testing import simulated_engine

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


async def test_lines_of_a_pipe():
    readable, writable = os.pipe()
    lines = Lines(readable)
    os.write(writable, b"one\r\ntw")
    assert await lines.next() == "one\r"
    os.write(writable, "ö\n\nlast".encode())
    os.close(writable)
    assert [await lines.next() for _ in range(4)] == ["twö", "", "last", None]
    os.close(readable)


@pytest.mark.parametrize(
    "data", [b"x" * 100, b"x" * 17 + b"\n", b"one\n" + b"x" * 17 + b"\n"], ids=["without an end", "with one", "later"]
)
async def test_a_line_that_is_too_long(monkeypatch, data):
    """With its end or without: memory is bounded, and earlier lines are answered."""
    monkeypatch.setattr(chat, "MAX_LINE", 16)
    monkeypatch.setattr(chat, "_CHUNK", 5)
    readable, writable = os.pipe()
    lines = Lines(readable)
    os.write(writable, b"y" * 16 + b"\n" + data)
    assert await lines.next() == "y" * 16
    if data.startswith(b"one"):
        assert await lines.next() == "one"
    with pytest.raises(RequestRejected, match="a line of the input is longer than 16 bytes"):
        await lines.next()
    os.close(writable)
    os.close(readable)


@pytest.mark.parametrize("as_json", [False, True])
async def test_an_answer_waits_for_the_next_worker(autojump_clock, capsys, as_json):
    async with simulated_engine() as (engine, simulation), engine.open_session() as session:
        simulation.worker.exit(-9)
        await engine.runtime.gate.changed()
        await answer_prompt(session, "hello", GREEDY, as_json=as_json)
    printed = capsys.readouterr().out
    assert printed.endswith("\n")
    text = json.loads(printed)["text"] if as_json else printed[:-1]
    assert len(text) == 5


async def test_a_chat_goes_on_after_a_line_that_cannot_be_answered(autojump_clock, capsys):
    readable, writable = os.pipe()
    os.write(writable, b"hello\ncaf\xe9\n" + b"long " * 600 + b"\n\n \nbye\n\n")
    os.close(writable)
    async with simulated_engine() as (engine, _), engine.open_session() as session:
        await answer_lines(session, Lines(readable), GREEDY)
        assert [message["content"] for message in session.history if message["role"] == "user"] == ["hello", "bye"]
    os.close(readable)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    not_utf8, too_long = printed.err.splitlines()
    assert not_utf8 == "trioengine: error: prompt is not UTF-8"
    assert too_long.startswith("trioengine: error: ")
