"""The budget of payloads: bytes are given back once, what is pinned stays, what nobody wants is closed."""

from itertools import count

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineOverloaded, RequestRejected
from trioengine.actors.payload import PayloadBudget
from trioengine.core.image import ImageFormat, ImageInfo

INFO = ImageInfo(ImageFormat.PNG, 4, 3)


class Bytes:
    """Sealed bytes that are closed once."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self.is_closed = False

    def close(self):
        assert not self.is_closed, "closed twice"
        self.is_closed = True


def make(budget, num_bytes):
    reservation = budget.reserve(num_bytes, 1)
    payload = reservation.make(Bytes(num_bytes), INFO, b"digest", num_bytes)
    reservation.give_back()
    return payload


def kept(budget, num_bytes):
    payload = make(budget, num_bytes)
    payload.hold()
    payload.unpin()
    return payload


def test_a_payload_that_nobody_holds_is_closed_when_it_is_not_pinned():
    budget = PayloadBudget(100, 10)
    payload = make(budget, 60)
    assert (budget.bytes_in_flight, budget.bytes_kept) == (60, 0)
    sealed = payload.sealed
    payload.unpin()
    assert sealed.is_closed and payload.is_dropped
    assert (budget.bytes_in_flight, budget.bytes_kept) == (0, 0)


def test_a_payload_is_kept_while_a_conversation_holds_it():
    budget = PayloadBudget(100, 10)
    payload = kept(budget, 60)
    assert not payload.is_dropped
    assert (budget.bytes_in_flight, budget.bytes_kept) == (0, 60)
    payload.release()
    assert payload.is_dropped and not budget.payloads


def test_what_is_kept_makes_room_the_least_recently_used_first():
    budget = PayloadBudget(100, 10)
    first, second, third = (kept(budget, 30) for _ in range(3))
    first.pin()
    first.unpin()
    make(budget, 35)
    assert [payload.is_dropped for payload in (first, second, third)] == [False, True, False]


def test_descriptors_are_part_of_the_budget():
    budget = PayloadBudget(100, 2)
    first, second = kept(budget, 1), make(budget, 1)
    make(budget, 1)
    assert first.is_dropped and not second.is_dropped
    with pytest.raises(EngineOverloaded):
        budget.reserve(1, 1)
    with pytest.raises(RequestRejected, match="3 images, and the engine takes at most 2"):
        budget.reserve(1, 3)


def test_what_is_larger_than_the_budget_is_refused_and_drops_nothing():
    budget = PayloadBudget(100, 10)
    payload = kept(budget, 60)
    with pytest.raises(RequestRejected, match="101 bytes, and the engine takes at most 100"):
        budget.reserve(101, 1)
    assert not payload.is_dropped


def test_what_has_to_wait_drops_nothing():
    budget = PayloadBudget(100, 10)
    payload, _ = kept(budget, 30), make(budget, 60)
    with pytest.raises(EngineOverloaded, match="60 of 100 bytes") as caught:
        budget.reserve(50, 1)
    assert caught.value.is_full and caught.value.code == "payloads"
    assert not payload.is_dropped


async def test_those_who_wait_are_served_in_order(autojump_clock):
    budget = PayloadBudget(100, 10)
    payload, got = make(budget, 90), []

    async def wait_for(num_bytes):
        def reserve():
            budget.reserve(num_bytes, 1)
            got.append(num_bytes)

        await budget.line.wait(reserve)

    async with trio.open_nursery() as nursery:
        for num_bytes in (80, 20):
            nursery.start_soon(wait_for, num_bytes)
            await wait_all_tasks_blocked()
        payload.unpin()
    assert got == [80, 20]


class BudgetMachine(RuleBasedStateMachine):
    """Any order of reservations, pins and holds."""

    def __init__(self):
        super().__init__()
        self.budget = PayloadBudget(100, 5)
        self.reservations = []
        self.pins = []  # a payload once for each pin
        self.holds = []
        self.sealed = []
        self.ids = count()

    @rule(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3))
    def reserve(self, sizes):
        try:
            reservation = self.budget.reserve(sum(sizes), len(sizes))
        except (EngineOverloaded, RequestRejected):
            return
        self.reservations.append((reservation, sizes))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), shrinks=st.booleans())
    def make(self, data, shrinks):
        reservation, sizes = data.draw(st.sampled_from(self.reservations))
        if sizes:
            size = sizes.pop()
            sealed = Bytes(max(1, size // 2) if shrinks else size)
            self.sealed.append(sealed)
            self.pins.append(reservation.make(sealed, INFO, b"", size))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def give_back(self, data):
        reservation, _ = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        reservation.give_back()

    @precondition(lambda self: self.pins or self.holds)
    @rule(data=st.data(), way=st.sampled_from(["pin", "hold"]))
    def take(self, data, way):
        payload = data.draw(st.sampled_from([*self.pins, *self.holds]))
        if way == "pin" and not payload.is_dropped:
            payload.pin()
            self.pins.append(payload)
        elif way == "hold":
            payload.hold()
            self.holds.append(payload)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).unpin()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))).release()

    @invariant()
    def the_books_balance(self):
        self.budget.check()
        assert all(not payload.is_dropped for payload in self.pins)
        open_bytes = sum(sealed.num_bytes for sealed in self.sealed if not sealed.is_closed)
        reserved = sum(sum(sizes) for _, sizes in self.reservations)
        assert self.budget.bytes_in_flight + self.budget.bytes_kept == open_bytes + reserved
        wanted = {id(payload) for payload in [*self.pins, *self.holds]}
        assert all(id(payload) in wanted for payload in self.budget.payloads)

    def teardown(self):
        for reservation, _ in self.reservations:
            reservation.give_back()
        for payload in self.pins:
            payload.unpin()
        for payload in self.holds:
            payload.release()
        assert all(sealed.is_closed for sealed in self.sealed)
        assert not self.budget.bytes_in_flight + self.budget.bytes_kept


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
