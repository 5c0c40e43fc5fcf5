"""What the log says of a sleep: its beginning, how it drains, what it ended, and how many were refused meanwhile."""

import logging

import pytest
import trio
from helpers.expectations import LONG, generated
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, EngineConfig, SamplingParams
from trioengine.testing import simulated_engine

SHORT = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "trioengine")
    return lambda: [message for message in caplog.messages if message.startswith(("sleep", "update", "sessions"))]


@pytest.mark.parametrize(
    ("mode", "counts"),
    [("abort", "aborted: 2, suspended: 0"), ("keep", "aborted: 0, suspended: 2"), ("wait", "aborted: 1, suspended: 0")],
)
async def test_a_sleep_logs_what_it_does(autojump_clock, messages, mode, counts):
    """Two requests run, in sessions of their own, and a third session is idle. With a timeout one finishes in time."""
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery, engine.open_session() as idle:
        async with idle.generate("x", SHORT) as generation:
            await generation.result()
        for params in (LONG, SHORT):
            nursery.start_soon(engine.generate, "x", params)
        await generated(engine, 12)
        timeout = 1 if mode == "wait" else None
        await engine.sleep(mode=mode, timeout=timeout)
        begun, *drained, ended, done = messages()
        assert begun == f"sleep at level 1 ({mode}): begins; requests in flight: 2, sessions: 3"
        assert drained == (
            ["sleep at level 1 (wait): waits for requests in flight: 2, timeout: 1.0"] if timeout else []
        )
        assert ended == f"sleep at level 1 ({mode}): requests {counts}; sessions detached: {2 if timeout else 3}"
        assert done == f"sleep at level 1 ({mode}): the engine is asleep, with weights 1"
        await engine.wake()


@pytest.mark.parametrize("keep_waiting", [False, True])
async def test_what_waits_in_line_is_counted(autojump_clock, messages, keep_waiting):
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(lambda: engine.generate("x", LONG, wait=True))
        await wait_all_tasks_blocked()
        await engine.sleep(keep_waiting=keep_waiting)
        count = 1 if keep_waiting else 4
        assert f"requests aborted: {count}, suspended: 0" in messages()[1]
        nursery.cancel_scope.cancel()


async def test_refusals_are_one_line(autojump_clock, messages):
    """When all is awake again, or the engine is closed; none where nothing was refused."""
    async with simulated_engine() as (engine, _):
        for count in (3, 0, 2):
            await engine.sleep(2)
            for _ in range(count):
                with pytest.raises(EngineAsleep):
                    await engine.generate("x", SHORT)
            assert not messages()[-1].startswith("sessions")
            if count != 2:
                await engine.wake(["kv_cache"])
                assert not messages()[-1].startswith("sessions")
                await engine.wake()
    refusals = [message.rpartition(" ")[2] for message in messages() if message.startswith("sessions")]
    assert refusals == ["3", "2"]
