"""Traces of programs that fail: the user's tasks and lines beside the engine's events, up to the failure."""

import pytest
import trio

from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, replayed, silence


class Impatient(LifecycleMachine):
    """A task of its app asks, and does not expect that anyone aborts its request."""

    async def app(self, engine):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit, engine)


async def visit(engine):
    async with engine.open_session() as session:
        completion = await session.ask("to be", max_tokens=8)
        assert completion.finish_reason != "abort", "aborted"


@pytest.fixture(scope="module")
def trace():
    with silence():
        program = Fuzzer(Impatient, PROFILES["quick"], seed=0).run(seconds=60).program
        return replayed(Impatient, program).trace.lines


def test_the_users_tasks_start_and_end(trace):
    assert any("  task app-" in line and line.endswith(" starts") for line in trace)
    assert any("  task test_trace.visit starts, by test_trace.py:" in line for line in trace)
    assert any(line.endswith("  task test_trace.visit ends") for line in trace)
    assert any("  task app-" in line and line.endswith(" ends with ExceptionGroup") for line in trace)


def test_an_event_shows_the_users_line_that_caused_it(trace):
    assert any(": reserve, by test_trace.py:20 visit" in line for line in trace)


def test_an_event_of_the_environment_shows_none(trace):
    """Neither the test that runs the fuzzer, nor the program that was started from the shell."""
    aborted = [line for line in trace if ": abort" in line or "loading: ready" in line]
    assert len(aborted) >= 2 and not any(", by " in line for line in aborted)


def test_it_ends_at_the_failure(trace):
    assert trace[-1].endswith("  the failure") and sum("the failure" in line for line in trace) == 1
