"""The loop under the fuzzer: passes by hand, picks as data, the same steps every time."""

import gc
import math
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio._core import _run

from trioengine.aio.calls import whole_answer
from trioengine.testing.sim_loop import Livelock, SimLoop


@pytest.fixture
def loop():
    loop = SimLoop()
    yield loop
    loop.close()


def test_the_private_name_is_still_what_it_was():
    """`_r` is trio's scheduler's randomness, which trio registers with hypothesis: if this fails, SimLoop's picks no
    longer reach the scheduler. Look into trio/_core/_run.py for what shuffles a batch of tasks now."""
    assert callable(_run._r.shuffle), "trio._core._run._r is no random generator any more"
    assert _run._ALLOW_DETERMINISTIC_SCHEDULING, "trio does not sort its tasks, though hypothesis was imported"


def test_a_pick_says_who_goes_first(loop):
    order = []

    async def say(name):
        order.append(name)

    for name in "abc":
        loop.start_soon(say, name, name=name)
    loop.tick([1])
    assert order == ["b", "c", "a"]
    for name in "abc":
        loop.start_soon(say, name, name=name)
    loop.tick()
    assert order[3:] == ["a", "b", "c"]


def test_settling_stops_where_everything_waits(loop):
    done = trio.Event()

    async def work():
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        await trio.sleep(10)
        done.set()

    loop.start_soon(work, name="work")
    loop.settle()
    assert loop.passes == 7  # the last one finds nothing to do
    loop.settle()
    assert loop.passes == 8
    assert loop.seconds_to_next_deadline() == pytest.approx(10)
    loop.clock.jump(10)
    loop.settle()
    assert done.is_set() and loop.idle and loop.seconds_to_next_deadline() == math.inf


def test_a_task_that_never_waits_is_a_livelock(loop):
    async def spin():
        while True:
            await trio.lowlevel.checkpoint()

    loop.start_soon(spin, name="spin")
    with pytest.raises(Livelock, match="spin"):
        loop.settle(limit=50)


def test_a_crash_is_collected_and_disturbs_nobody(loop):
    async def crash():
        raise KeyError("x")

    loop.start_soon(crash, name="crash")
    loop.settle()
    assert [type(error) for error in loop.crashes] == [KeyError]


def test_tasks_that_wait_are_cancelled_at_the_end_also_behind_a_shield():
    loop = SimLoop()

    async def stubborn():
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await trio.sleep_forever()

    loop.start_soon(stubborn, name="stubborn")
    loop.settle()
    assert "stubborn" in loop.stacks() and "sleep_forever" in loop.stacks()
    loop.close()


@pytest.mark.parametrize("is_task", [False, True])
def test_the_stack_of_a_whole_answer_is_complete(loop, is_task):
    @whole_answer
    async def ask():
        await trio.sleep_forever()

    async def caller():
        await ask()

    loop.start_soon(ask if is_task else caller, name="caller")
    loop.settle()
    assert "in ask\n" in loop.stacks()


def test_a_loop_that_is_given_up_leaves_nothing_behind():
    def spin_for_ever():
        loop = SimLoop()

        async def spin():
            while True:
                with suppress(trio.Cancelled):
                    await trio.lowlevel.checkpoint()

        loop.start_soon(spin, name="spin")
        loop.tick([0] * 3)
        with pytest.raises(Livelock, match="did not end"):
            loop.close(limit=20)

    def state():
        return signal.getsignal(signal.SIGINT), len(list(Path("/proc/self/fd").iterdir())), _run._r

    before = state()
    for _ in range(3):
        spin_for_ever()
    gc.collect()
    assert state() == before
    loop = SimLoop()
    loop.settle()
    loop.close()


def test_an_interrupt_comes_out():
    """Whether it hits a task, or what is between the passes."""
    loop = SimLoop()

    async def interrupted():
        signal.raise_signal(signal.SIGINT)

    loop.start_soon(interrupted, name="interrupted")
    with pytest.raises(KeyboardInterrupt):
        try:
            loop.settle()
        finally:
            loop.close()
