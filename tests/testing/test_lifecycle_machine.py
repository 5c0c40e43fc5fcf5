"""Machines for programs of other people: an app, a server, and the bugs that they may have."""

import gc
import math
import weakref
from contextlib import suppress
from typing import ClassVar

import pytest
import trio
from hypothesis import strategies as st

from trioengine import EngineClosed, EngineError, EngineOverloaded
from trioengine.actors.engine import Engine
from trioengine.core.types import Cause, FinishReason
from trioengine.testing.fuzz import LifecycleMachine, rule, runner
from trioengine.testing.fuzz.describe import trace_text
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.machine import LONGEST, Finding, Machine
from trioengine.testing.fuzz.program import Program, recorded
from trioengine.testing.fuzz.runner import MOST_INTERRUPTS, PROFILES, Fuzzer, replayed, silence
from trioengine.testing.fuzz.trace import place
from trioengine.testing.sim_loop import Livelock

PROGRAMS = 150


class Chat(LifecycleMachine):
    async def app(self, engine):
        """Two turns, unless the engine is full or closed."""
        try:
            async with engine.open_session() as session:
                for prompt in ("a", "be"):
                    completion = await session.ask(prompt, max_tokens=3)
                    assert len(completion.token_ids) <= 3
        except (EngineOverloaded, EngineClosed):
            pass


class Hopeful(LifecycleMachine):
    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=20)
        assert completion.finish_reason is not FinishReason.ABORT, "it was aborted"


class Alone(LifecycleMachine):
    async def app(self, engine):
        completion = await engine.ask("to be", max_tokens=20, wait=True)
        assert completion.cause is not Cause.CLIENT, "an operator aborted it alone"


class Hold(LifecycleMachine):
    """A program that ends with the engine."""

    keeps_sessions = True

    async def serve(self, engine, listener):
        async with engine.open_session() as session:
            await session.ended()


class Unsafe(LifecycleMachine):
    """A program that tries to open more sessions than there may be, without a word about that."""

    async def app(self, engine):
        async with engine.open_session(), engine.open_session():
            raise KeyError("a bug")


class Echo(LifecycleMachine):
    """A server that answers each line with the engine's answer."""

    async def answer(self, session, line):
        return (await session.ask(line.decode("ascii", "replace"), max_tokens=3)).text

    async def converse(self, stream):
        async with self.engine.open_session(wait=True) as session:
            received = Lines(stream)
            while (line := await received.next()) is not None:
                answer = await self.answer(session, line)
                await stream.send_all(f"{answer}\n".encode())

    async def handle(self, stream):
        try:
            async with stream:
                await self.converse(stream)
        except (trio.BrokenResourceError, EngineError):
            pass

    async def serve(self, engine, listener):
        await trio.serve_listeners(self.handle, [listener])

    @rule(count=st.integers(1, 3))
    def talk(self, count):
        if self.may_start:
            self.connect(self.speak, count)

    async def speak(self, stream, count):
        answers = Lines(stream)
        for _ in range(count):
            await stream.send_all(b"a\n")
            if await answers.next() is None:
                assert self.is_excused(), "the server hung up"
                return
        await stream.send_eof()
        assert await answers.next() is None, "one answer too many"


class Lines:
    """The lines that a stream receives, without their ends."""

    def __init__(self, stream):
        self.stream, self.data = stream, b""

    async def next(self):
        while b"\n" not in self.data:
            data = await self.stream.receive_some()
            if not data:
                return None
            self.data += data
        line, _, self.data = self.data.partition(b"\n")
        return line


class Leak(Echo):
    """Sessions are opened in a nursery that outlives the connection."""

    async def serve(self, engine, listener):
        async with trio.open_nursery() as self.nursery:
            await super().serve(engine, listener)

    async def handle(self, stream):
        opened = trio.Event()
        self.nursery.start_soon(self.hold, opened)
        await opened.wait()
        await super().handle(stream)

    async def hold(self, opened):
        try:
            async with self.engine.open_session(wait=True):
                opened.set()
                await trio.sleep_forever()
        except EngineError:
            opened.set()


class LostWakeUp(Echo):
    """A lock that a cancelled waiter takes with it."""

    def __init__(self):
        super().__init__()
        self.is_taken, self.free = False, trio.Event()

    async def answer(self, session, line):
        while self.is_taken:
            await self.free.wait()
        self.is_taken, self.free = True, trio.Event()
        answer = await super().answer(session, line)  # not in a try: a cancellation never frees it
        self.is_taken = False
        self.free.set()
        return answer


class DoubleAnswer(Echo):
    """A request that was aborted by a sleep is asked again, and both answers are sent."""

    async def converse(self, stream):
        async with self.engine.open_session(wait=True) as session:
            received = Lines(stream)
            while (line := await received.next()) is not None:
                text = line.decode("ascii", "replace")
                completion = await session.ask(text, max_tokens=3)
                await stream.send_all(f"{completion.text}\n".encode())
                if completion.finish_reason is FinishReason.ABORT:
                    completion = await session.ask(text, max_tokens=3)
                    await stream.send_all(f"{completion.text}\n".encode())


def fuzzed(machine, programs=PROGRAMS, **options):
    with silence():
        return Fuzzer(machine, PROFILES["quick"], 0, **options).run(examples=programs)


@pytest.mark.parametrize("machine", [Chat, Hold, Echo])
def test_a_correct_program_has_no_findings(machine):
    report = fuzzed(machine)
    assert report.failure is None, f"{report.failure!r}\n{report.program}"
    assert report.machine == machine.__name__ and report.programs >= PROGRAMS


def test_a_program_is_disturbed_in_every_way():
    coverage = fuzzed(Echo, 400).coverage  # one in a hundred programs has the rarest
    for way in ("close", "hang up", "half-close", "reset", "stall", "vanish", "garbage", "read again"):
        assert f"{way} while a response is active" in coverage
    assert "session running, attached: end" in coverage and "a worker's last frame is torn" in coverage


@pytest.mark.parametrize(
    ("machine", "failure"),
    [
        (Hopeful, "it was aborted"),
        (Alone, "an operator aborted it alone"),
        (Unsafe, "a bug"),
        (Leak, f"sessions are left, opened at {__file__}"),
        (LostWakeUp, "wait forever:\ntasks wait in testing/test_lifecycle_machine.py:"),
        (DoubleAnswer, "one answer too many"),
    ],
)
def test_a_bug_of_a_program_is_found_and_shrunk(machine, failure):
    report = fuzzed(machine, 3000)
    assert failure in str(report.failure), f"{report.programs} programs: {report.failure!r}\n{report.program}"
    assert report.program.length <= 8, report.program
    with silence():
        assert failure in str(replayed(machine, report.program).failure)


class Busy(LifecycleMachine):
    longest = 0.1

    async def app(self, engine):
        while True:
            with suppress(ValueError):
                raise ValueError


def test_a_task_that_never_lets_another_one_run_is_a_finding():
    program = Program("Busy", [("begin", {"ready": True}), ("start", {}), ("settle", {})])
    with silence():
        found = replayed(Busy, program)
    assert isinstance(found.failure, Livelock) and "let no other one run" in str(found.failure)
    assert place(found.failure).endswith("in app")


class Waiting(LifecycleMachine):
    async def app(self, engine):
        await trio.sleep_forever()


def test_lines_of_a_trace_that_repeat_are_one():
    with silence():
        found = replayed(Waiting, Program("Waiting", [("settle", {}), ("start", {})]))
    shown = trace_text(found.trace, whole=False)
    assert "worker 1001 -> PONG, 15 times to 60.00 s\n" in shown and "start()\n" in shown, shown
    assert "prints" not in shown, "nothing is left out"


class Endless(Machine):
    longest = 0.1

    @recorded()
    def run(self):
        while True:
            pass


def test_a_machine_is_interrupted_after_the_end_of_another_one():
    endless = Endless()
    Endless().teardown()
    with pytest.raises(Finding, match="let no other one run"):
        endless.run()
    endless.teardown()


def test_a_rule_may_take_as_long_as_it_wants():
    class Unlimited(Endless):
        longest = math.inf

        @recorded()
        def run(self):
            pass

    machine = Unlimited()
    machine.run()
    machine.teardown()
    assert machine.num_interrupts == 0 and machine.slowest == 0.0


def test_a_finding_whose_error_is_its_own_cause_is_let_go():
    first, second = ValueError(), KeyError()
    try:
        try:
            raise first
        except ValueError:
            raise second from first
    except KeyError:
        first.__cause__ = second
    Finding(second).let_go()
    assert first.__traceback__ is None and second.__traceback__ is None


class Spin(Echo):
    """An aborted request is asked again; the loop that is to send both answers never ends."""

    spent: ClassVar = []  # seconds of the processor's time until each interrupt, of all programs

    async def answer(self, session, line):
        completions = [await session.ask("a", max_tokens=3)]
        if completions[0].cause is not None:
            completions.append(await session.ask("a", max_tokens=3))
        while len(completions) > 1:
            pass
        return completions[0].text

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.spent += [self.longest] * self.num_interrupts


@pytest.mark.parametrize("most", [MOST_INTERRUPTS, 5])
def test_a_task_that_never_lets_another_one_run_is_shrunk_soon(most, monkeypatch):
    monkeypatch.setattr(runner, "MOST_INTERRUPTS", most)
    monkeypatch.setattr(runner, "QUICK", 0.05)
    monkeypatch.setattr(Spin, "spent", spent := [])
    report = fuzzed(Spin, 3000)
    assert isinstance(report.failure, Livelock), report.failure
    assert spent[0] == LONGEST and max(spent[1:]) < LONGEST / 2 and len(spent) <= 2 * most + 2, spent
    if most == MOST_INTERRUPTS:
        assert report.program.length <= 4, report.program


class OwnEngine(EngineMachine):
    def make_engine(self, config, ports):
        self.made = Engine(config, ports=ports)
        return self.made


def test_a_machine_drives_the_engine_that_it_makes():
    with silence():
        machine, failure, _ = replayed(OwnEngine, Program("OwnEngine", [("settle", {})]))
    assert failure is None and machine.engine is machine.made


def test_machines_that_failed_are_freed():
    """When the next attempt begins: only the errors that are to be reported keep their machines, by their frames."""
    failed, left = [], []

    class Watched(Unsafe):
        def __init__(self):
            gc.collect()
            left.append(sum(machine() is not None for machine in failed))
            super().__init__()

        def teardown(self):
            try:
                super().teardown()
            finally:
                if self.finding is not None:
                    failed.append(weakref.ref(self))

    report = fuzzed(Watched, 300)
    assert "a bug" in str(report.failure) and len(failed) > 10
    assert max(left) <= 2, str(left)
    assert place(report.failure).endswith("in app"), "the lines of the traceback are kept"
    del report
    gc.collect()
    assert not any(machine() for machine in failed), "a machine is left when the report has gone"
