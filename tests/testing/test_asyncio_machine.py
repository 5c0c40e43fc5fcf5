"""Machines for programs on asyncio, where the package simloop is installed."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from trioengine.testing.fuzz import rule
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, replayed, silence

if sys.version_info < (3, 12):
    pytest.skip("simloop needs Python 3.12", allow_module_level=True)
simloop = pytest.importorskip("simloop")
from trioengine.testing.fuzz.asyncio_machine import AsyncioMachine  # noqa: E402 -- it needs simloop

PROGRAMS = 300


class Upper(AsyncioMachine):
    """A server that answers each line in upper case, one at a time of all connections."""

    async def serve(self):
        self.lock = asyncio.Lock()
        async with await asyncio.start_server(self.handle, port=self.port) as server:
            await server.serve_forever()

    async def handle(self, reader, writer):
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                await self.answer(line, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def answer(self, line, writer):
        async with self.lock:
            await asyncio.sleep(0.1)
        writer.write(line.upper())
        await writer.drain()

    @rule(count=st.integers(1, 3))
    def talk(self, count):
        if self.may_start:
            self.connect(self.speak, count)

    async def speak(self, reader, writer, count):
        for _ in range(count):
            writer.write(b"a\n")
            assert await reader.readline() == b"A\n", "not the answer"
        writer.write_eof()
        assert not await reader.read(), "one answer too many"


class Leak(Upper):
    """Tasks are started that outlive their connection."""

    async def handle(self, reader, writer):
        self.kept = asyncio.ensure_future(asyncio.Event().wait())
        await super().handle(reader, writer)


class LostWakeUp(Upper):
    """A lock that a disconnect takes with it."""

    async def answer(self, line, writer):
        await self.lock.acquire()
        writer.write(line.upper())
        await writer.drain()
        self.lock.release()  # not in a try


class DoubleAnswer(Upper):
    """An answer that is late is sent again."""

    async def answer(self, line, writer):
        try:
            async with asyncio.timeout(0.5):
                await super().answer(line, writer)
        except TimeoutError:
            writer.write(line.upper())
            await super().answer(line, writer)


class Forgotten(AsyncioMachine):
    """A task fails, and its error is never read."""

    async def app(self):
        self.background = asyncio.ensure_future(self.fail())
        await asyncio.sleep(1)

    async def fail(self):
        raise KeyError("a bug")


class Race(AsyncioMachine):
    """Two tasks, of which the second must not come first."""

    async def app(self):
        done = []
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(self.add(done, number))
        assert done == [0, 1], "the second came first"

    async def add(self, done, number):
        await asyncio.sleep(0)
        done.append(number)


class Subprocess(AsyncioMachine):
    async def app(self):
        await asyncio.create_subprocess_exec("true")


def fuzzed(machine, programs=PROGRAMS):
    with silence():
        return Fuzzer(machine, PROFILES["quick"], 0).run(examples=programs)


def test_a_correct_program_has_no_findings():
    report = fuzzed(Upper)
    assert report.failure is None, f"{report.failure!r}\n{report.program}"
    assert {"close", "reset", "stall", "vanish", "garbage"} <= report.coverage.keys()


@pytest.mark.parametrize(
    ("machine", "failure"),
    [
        (Leak, "tasks are left"),
        (LostWakeUp, "wait forever"),
        (DoubleAnswer, "one answer too many|not the answer"),
        (Forgotten, "a bug"),
        (Race, "the second came first"),
        (Subprocess, "simloop does not simulate 'subprocess_exec'"),
    ],
)
def test_a_bug_of_a_program_is_found_and_shrunk(machine, failure):
    report = fuzzed(machine, 3000)
    with pytest.raises(Exception, match=failure):
        raise report.failure or AssertionError(f"nothing in {report.programs} programs")
    assert report.program.length <= 4, report.program
    with silence():
        found = [replayed(machine, report.program) for _ in range(2)]
    assert str(found[0].failure) == str(found[1].failure) == str(report.failure)
    assert found[0].machine.checksum == found[1].machine.checksum and found[0].trace.lines == found[1].trace.lines


GUIDE = Path(__file__).parents[2] / "docs" / "fuzzing-your-code.md"


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ("", "", None),
        ("self.room.remove(socket)", "pass", "one who has left is in the room"),
        ("broadcast(self.room, message)", "self.room.clear()", "wait forever"),
    ],
)
def test_the_program_of_the_guide(old, new, failure):
    pytest.importorskip("websockets")
    (block,) = re.findall(r"```python\n(?=[^`]*AsyncioMachine)(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert old in block
    names = {"__name__": "guide"}
    exec(block.replace(old, new) if old else block, names)
    report = fuzzed(names["RoomMachine"], 100)
    found = None if report.failure is None else str(report.failure)
    assert (found is None) if failure is None else failure in (found or ""), f"{found}\n{report.program}"
