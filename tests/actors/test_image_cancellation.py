"""Calls with images, cancelled on their way in: the bytes that they have reserved and sealed are given back, once."""

import pytest
import trio
from helpers.image_sessions import LONG, OTHER, PICTURE, SIZE, content_of, engine_for_images
from trio.testing import wait_all_tasks_blocked

PICTURES = [PICTURE, OTHER]


async def generate(engine):
    await engine.generate("What?", LONG, media=PICTURES, wait=True)


async def keep(engine):
    with await engine.keep_images([content_of(*PICTURES)]):
        await trio.sleep_forever()


async def open_session(engine):
    async with engine.open_session(history=[content_of(*PICTURES)]):
        await trio.sleep_forever()


CALLS = [generate, keep, open_session]


@pytest.mark.parametrize(("call", "passes"), [(call, passes) for call in CALLS for passes in range(14)])
async def test_cancelled_at_any_pass_nothing_is_left(autojump_clock, call, passes):
    """From the reservation to the send, and beyond."""
    async with engine_for_images() as (engine, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, engine)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()


class Call:
    """A call that is on its way in, beside a reservation of SIZE bytes that is none of its own."""

    def __init__(self, engine, simulation, call, nursery):
        self.engine, self.simulation = engine, simulation
        self.scope = trio.CancelScope()
        self.other = engine.runtime.images.budget.reserve_now(SIZE, 1)
        nursery.start_soon(self._run, call)

    async def _run(self, call):
        with self.scope:
            await call(self.engine)

    @property
    def reserved_and_sealed(self):
        """Bytes of this call: those in flight, and those in memfds."""
        sealed = sum(memfd.num_bytes for memfd in self.simulation.memfds)
        return self.engine.statistics().payload_bytes_inflight - self.other.num_bytes, sealed

    async def until(self, is_so):
        for _ in range(100):
            if is_so():
                return
            await trio.lowlevel.checkpoint()
        raise AssertionError("the call never comes there")

    async def cancelled(self):
        """Cancel it, and check that it has given back its own bytes, and no others."""
        self.scope.cancel()
        await wait_all_tasks_blocked()
        assert self.reserved_and_sealed == (0, 0)
        self.other.give_back()
        assert not self.engine.statistics().payload_bytes_inflight


@pytest.mark.parametrize("call", CALLS)
async def test_cancelled_in_the_line_for_room(autojump_clock, call):
    async with engine_for_images(payload_memory=2 * SIZE) as (engine, simulation), trio.open_nursery() as nursery:
        started = Call(engine, simulation, call, nursery)
        await wait_all_tasks_blocked()
        assert len(engine.runtime.images.budget.line) == 1
        assert started.reserved_and_sealed == (0, 0)
        await started.cancelled()


@pytest.mark.parametrize("call", CALLS)
async def test_cancelled_in_the_step_in_which_the_line_has_served_it(autojump_clock, call):
    async with engine_for_images(payload_memory=2 * SIZE) as (engine, simulation), trio.open_nursery() as nursery:
        started = Call(engine, simulation, call, nursery)
        await wait_all_tasks_blocked()
        started.other.give_back()
        assert started.reserved_and_sealed == (2 * SIZE, 0)
        await started.cancelled()


@pytest.mark.parametrize("call", CALLS)
async def test_cancelled_in_the_thread_that_seals(autojump_clock, call):
    """The thread is waited for, and its memfds are closed."""
    async with engine_for_images(payload_memory=3 * SIZE) as (engine, simulation), trio.open_nursery() as nursery:
        started = Call(engine, simulation, call, nursery)
        await started.until(lambda: started.reserved_and_sealed == (2 * SIZE, 0))
        await trio.lowlevel.checkpoint()  # in the thread, which is not cancelled any more
        await started.cancelled()


@pytest.mark.parametrize("thread_threshold", [0, 1 << 13], ids=["in a thread", "in the event loop"])
async def test_cancelled_while_the_prompt_is_prepared(autojump_clock, thread_threshold):
    images = engine_for_images(payload_memory=3 * SIZE, thread_threshold=thread_threshold)
    async with images as (engine, simulation), trio.open_nursery() as nursery:
        started = Call(engine, simulation, generate, nursery)
        await started.until(lambda: started.reserved_and_sealed == (2 * SIZE, 2 * SIZE))
        assert engine.statistics().preparing == 1
        await started.cancelled()


async def test_cancelled_while_it_waits_for_a_worker(autojump_clock):
    """The worker is lost while the request waits for room, which it gets then."""
    async with engine_for_images(payload_memory=2 * SIZE) as (engine, simulation), trio.open_nursery() as nursery:
        started = Call(engine, simulation, generate, nursery)
        await wait_all_tasks_blocked()
        simulation.stalled_starts = 1
        simulation.worker.kill()
        await started.until(lambda: engine.runtime.gate.link is None)
        started.other.give_back()
        await started.until(lambda: len(engine.runtime.gate.commits) == 1)
        assert started.reserved_and_sealed == (2 * SIZE, 2 * SIZE)
        await started.cancelled()
        await engine.ready()
