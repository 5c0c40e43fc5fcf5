"""The loop under the fuzzer: passes by hand, picks as data, the same steps every time."""

import gc
import math
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
import trio
from trio import _threads
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
    assert callable(vars(_threads)["start_thread_soon"]), "to_thread.run_sync starts its threads by another name now"
    assert callable(_threads._send_message_to_trio), "from_thread calls into trio by another name now"


def started(loop, names="abc"):
    """A list to which tasks with these names add them when they run."""
    ran = []

    async def run(name):
        ran.append(name)

    for name in names:
        loop.start_soon(run, name, name=name)
    return ran


def test_an_order_is_any_permutation_of_the_runnable_tasks(loop):
    orders = []
    for order in range(6):
        ran = started(loop)
        loop.tick(1, order)
        orders.append("".join(ran))
    assert orders == ["abc", "bac", "cab", "acb", "bca", "cba"]
    ran = started(loop)
    loop.tick()
    assert ran == ["a", "b", "c"]


def test_an_order_goes_on_over_passes(loop):
    """The digits that one pass leaves choose the next one's order; behind them tasks go in the order of their start."""
    ran = []

    async def run(name):
        for _ in range(3):
            ran.append(name)
            await trio.lowlevel.checkpoint()

    for name in "ab":
        loop.start_soon(run, name, name=name)
    loop.tick(3, 0b01)
    assert "".join(ran) == "baabab"
    loop.tick(1, 0b11)  # what is left of it does not disturb what comes after
    ran = started(loop, "xy")
    loop.tick()
    assert ran == ["x", "y"]


def test_a_seed_gives_random_orders_until_another(loop):
    def orders(seed):
        loop.reorder(seed)
        for _ in range(40):
            ran = started(loop)
            loop.settle()
            yield "".join(ran)

    first = list(orders(1))
    assert len(set(first)) == 6, "each permutation occurs"
    assert list(orders(1)) == first != list(orders(2))
    assert set(orders(0)) == {"abc"}


def test_a_function_in_a_thread_runs_between_two_passes(loop):
    loop.thread_passes = 3
    ran = []

    async def call():
        ran.append(await trio.to_thread.run_sync(lambda: loop.passes))
        with pytest.raises(KeyError):
            await trio.to_thread.run_sync({}.__getitem__, 1)
        ran.append("after the error")

    loop.start_soon(call, name="call")
    loop.settle()
    assert ran == [5, "after the error"] and loop.idle and not loop.crashes


def test_a_call_from_a_thread_into_trio_is_refused(loop):
    async def call():
        await trio.to_thread.run_sync(trio.from_thread.run_sync, print)

    loop.start_soon(call, name="call")
    loop.settle()
    assert [type(error) for error in loop.crashes] == [RuntimeError] and loop.idle


def test_a_thread_that_is_abandoned_disturbs_nobody(loop):
    scope = trio.CancelScope()

    async def call():
        with scope:
            await trio.to_thread.run_sync(print, abandon_on_cancel=True)

    loop.start_soon(call, name="call")
    loop.tick()
    scope.cancel()
    loop.settle()
    assert loop.idle and not loop.crashes


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
    assert loop.seconds_to_next_deadline() == loop.seconds_of_rest() == pytest.approx(10)
    loop.clock.jump(10)
    loop.settle()
    assert done.is_set() and loop.idle and loop.seconds_to_next_deadline() == math.inf


def test_there_is_rest_until_the_next_deadline_unless_a_task_can_run(loop):
    loop.settle()
    assert loop.seconds_of_rest() == math.inf
    loop.start_soon(trio.sleep, 10, name="sleeper")
    assert loop.seconds_of_rest() == 0
    loop.settle()
    assert loop.seconds_of_rest() == pytest.approx(10)
    loop.clock.jump(11)
    assert loop.seconds_of_rest() == 0


def test_a_task_that_never_waits_is_a_livelock(loop):
    async def spin():
        while True:
            await trio.lowlevel.checkpoint()

    loop.start_soon(spin, name="spin")
    loop.start_soon(trio.sleep_forever, name="spin")
    with pytest.raises(Livelock, match=r"after 50 passes, in testing/test_sim_loop\.py:\d+ [\w.<>]+spin:\n"):
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


def test_places_are_the_innermost_functions_each_once(loop):
    async def wait():
        await trio.sleep_forever()

    async def caller():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)

    loop.start_soon(caller, name="caller")
    loop.settle()
    places = loop.places()
    assert places.startswith("tasks wait in testing/test_sim_loop.py:") and places.count(".wait") == 1
    assert places.endswith("<locals>.caller")
    assert loop.places(["other"]) == ""


@pytest.mark.parametrize("users", [True, False])
def test_places_are_in_files_of_the_users_where_there_are_any(users):
    async def caller():
        await anyio.sleep_forever()

    loop = SimLoop(lambda file: users and file == __file__)
    try:
        loop.start_soon(caller, name="caller")
        loop.settle()
        assert ("TrioBackend.sleep" in loop.places(["caller"])) is not users
        assert loop.places(["caller"]).endswith("<locals>.caller") is users
    finally:
        loop.close()


def test_a_loop_that_is_given_up_leaves_nothing_behind():
    def spin_for_ever():
        loop = SimLoop()

        async def spin():
            while True:
                with suppress(trio.Cancelled):
                    await trio.lowlevel.checkpoint()

        loop.start_soon(spin, name="spin")
        loop.tick(3)
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


@pytest.fixture
def interruptible():
    """As if the tests had not been started as a background job, for which a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_out(interruptible):
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
