"""Code of one's own under the rules of the environment."""

from functools import partial

from trioengine import EngineClosed, EngineOverloaded
from trioengine.actors.engine import Engine
from trioengine.core.types import FinishReason
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.environment import AppMachine
from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, replayed, silence

PROGRAMS = 100


async def chat(engine):
    """Two turns, unless the engine is full or closed."""
    try:
        async with engine.open_session() as session:
            for prompt in ("a", "be"):
                completion = await session.ask(prompt, max_tokens=3)
                assert len(completion.token_ids) <= 3
    except (EngineOverloaded, EngineClosed):
        pass


async def hopeful(engine):
    completion = await engine.ask("to be", max_tokens=20)
    assert completion.finish_reason is not FinishReason.ABORT, "it was aborted"


async def hold(engine):
    """Ends with the engine."""
    async with engine.open_session() as session:
        await session.ended()


def fuzzed(app, **options):
    with silence():
        return Fuzzer(partial(AppMachine, app), PROFILES["quick"], 0, name="chat", **options).run(examples=PROGRAMS)


def test_a_correct_app_has_no_findings():
    report = fuzzed(chat)
    assert report.failure is None, f"{report.failure!r}\n{report.program}"
    assert report.machine == "chat" and report.programs >= PROGRAMS
    assert "session running, attached: end" in report.coverage


def test_an_app_may_run_until_its_engine_ends():
    report = fuzzed(hold)
    assert report.failure is None, f"{report.failure!r}\n{report.program}"


def test_a_bug_of_an_app_is_found_and_shrunk():
    report = fuzzed(hopeful)
    assert "it was aborted" in str(report.failure)
    assert report.program.length <= 4
    with silence():
        failure = replayed(partial(AppMachine, hopeful), report.program).failure
    assert "it was aborted" in str(failure)


def test_a_machine_drives_the_engine_that_its_factory_makes():
    made = []

    def make(config, ports):
        made.append(Engine(config, ports=ports))
        return made[-1]

    with silence():
        machine, failure, _ = replayed(partial(EngineMachine, make), Program("EngineMachine", [("settle", {})]))
    assert failure is None and [machine.engine] == made
