"""The gate alone: who waits for a slot gets one in the order of arrival, and nobody else is woken."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineClosed, EngineConfig, EngineOverloaded, InvariantError, TimedOut
from trioengine.actors.effects import Effects
from trioengine.actors.gate import Gate
from trioengine.aio.concurrency import NEVER, deadline_after
from trioengine.core.ledger import RequestState
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import FinishReason

ONE = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64, max_sessions=1)


class Caller:
    """Waits at the gate in a task of its own."""

    def __init__(self, gate, line, admission):
        self.scope = trio.CancelScope()
        self.answer = None
        self._admit = (gate, line, admission)

    async def run(self, deadline=NEVER):
        gate, line, admission = self._admit
        with self.scope:
            try:
                await gate.admit(line, admission, wait=True, deadline=deadline)
                self.answer = "in"
            except (EngineOverloaded, EngineClosed, TimedOut) as exc:
                self.answer = exc


class Slots:
    """One kind of slot of a gate that has one of them, which is taken."""

    def __init__(self, kind):
        self.gate = Gate(ONE, Effects(lambda _: self.gate.serve()))
        self.gate.change_power(PowerEvent.READY)
        self.line = self.gate.sessions if kind == "session" else self.gate.requests
        self.admission = self.gate.admit_session if kind == "session" else self.gate.admit_request
        self._kind = kind
        self.admission()

    def free(self):
        if self._kind == "session":
            self.gate.free_session()
        else:
            self.gate.ledger.settle(RequestState.PREPARING, FinishReason.ABORT)
            self.gate.serve_requests()

    async def queue(self, nursery, count, **options):
        callers = [Caller(self.gate, self.line, self.admission) for _ in range(count)]
        for caller in callers:
            nursery.start_soon(lambda caller=caller: caller.run(**options), name="caller")
            await wait_all_tasks_blocked()
        return callers


@pytest.fixture(params=["session", "request"])
def slots(request):
    return Slots(request.param)


async def test_in_the_order_of_arrival(slots):
    async with trio.open_nursery() as nursery:
        callers = await slots.queue(nursery, 5)
        for number in range(5):
            slots.free()
            await wait_all_tasks_blocked()
            assert [caller.answer for caller in callers] == ["in"] * (number + 1) + [None] * (4 - number)
    assert len(slots.line) == 0


async def test_nobody_overtakes_even_in_the_step_that_frees_a_slot(slots):
    """The slot is handed over: a newcomer finds it taken, and waits behind the others if it waits."""
    async with trio.open_nursery() as nursery:
        (first,) = await slots.queue(nursery, 1)
        slots.free()
        with pytest.raises(EngineOverloaded):
            await slots.gate.admit(slots.line, slots.admission, wait=False)
        (second,) = await slots.queue(nursery, 1)
        assert (first.answer, second.answer) == ("in", None)
        slots.free()


class Steps(trio.abc.Instrument):
    def __init__(self):
        self.count = 0

    def before_task_step(self, task):
        self.count += task.name == "caller"


async def test_one_slot_wakes_one_of_a_thousand(slots):
    async with trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(Caller(slots.gate, slots.line, slots.admission).run, name="caller")
        await wait_all_tasks_blocked()
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        slots.free()
        await wait_all_tasks_blocked()
        slots.gate.change_power(PowerEvent.WORKER_LOST)
        slots.gate.change_power(PowerEvent.READY)
        await wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count == 1
        nursery.cancel_scope.cancel()


async def test_who_is_cancelled_leaves_the_line_in_that_step(slots):
    async with trio.open_nursery() as nursery:
        callers = await slots.queue(nursery, 3)
        callers[0].scope.cancel()
        callers[1].scope.cancel()
        slots.free()
        await wait_all_tasks_blocked()
    assert [caller.answer for caller in callers] == [None, None, "in"]


async def test_who_was_handed_a_slot_has_it_though_cancelled_in_the_same_step(slots):
    """It is the caller's to give back: nothing is lost between the hand-over and the caller's next step."""
    async with trio.open_nursery() as nursery:
        first, second = await slots.queue(nursery, 2)
        slots.free()
        first.scope.cancel()
        await wait_all_tasks_blocked()
        assert (first.answer, second.answer) == ("in", None)
        slots.free()
    assert second.answer == "in"


async def test_a_deadline_passes_the_slot_on(autojump_clock, slots):
    async with trio.open_nursery() as nursery:
        (first,) = await slots.queue(nursery, 1, deadline=deadline_after(5))
        (second,) = await slots.queue(nursery, 1)
        await trio.sleep(5)
        await wait_all_tasks_blocked()
        assert isinstance(first.answer, TimedOut)
        assert isinstance(first.answer.__cause__, EngineOverloaded)
        slots.free()
    assert second.answer == "in"


@pytest.mark.parametrize("event", [PowerEvent.DRAIN, PowerEvent.CLOSE])
async def test_an_engine_that_drains_or_closes_tells_all(slots, event):
    async with trio.open_nursery() as nursery:
        callers = await slots.queue(nursery, 3)
        slots.gate.change_power(event)
    assert all(isinstance(caller.answer, EngineClosed) for caller in callers)


async def test_a_restart_is_waited_for():
    slots = Slots("request")
    async with trio.open_nursery() as nursery:
        (caller,) = await slots.queue(nursery, 1)
        slots.gate.change_power(PowerEvent.WORKER_LOST)
        slots.free()
        await wait_all_tasks_blocked()
        assert caller.answer is None
        slots.gate.change_power(PowerEvent.READY)
    assert caller.answer == "in"


async def test_a_bug_in_one_admission_is_told_to_its_caller_alone(slots):
    bugs = iter([EngineOverloaded("full", code="queue"), ZeroDivisionError()])

    def broken():
        raise next(bugs)

    async with trio.open_nursery() as nursery:

        async def call():
            with pytest.raises(ZeroDivisionError):
                await slots.gate.admit(slots.line, broken, wait=True)

        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        (second,) = await slots.queue(nursery, 1)
        slots.free()
    assert second.answer == "in"


async def test_a_free_slot_while_someone_waits_is_an_invariant_broken(slots):
    async with trio.open_nursery() as nursery:
        await slots.queue(nursery, 1)
        slots.gate.check()
        slots.gate.ledger.__init__()
        with pytest.raises(InvariantError, match="wait"):
            slots.gate.check()
        nursery.cancel_scope.cancel()
