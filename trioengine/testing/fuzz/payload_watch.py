"""Payloads from the reservation of their bytes to the worker: pins, holders, and one end each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.images import MAX_WAIT, KeptImages, RequestImages, payload_of
from trioengine.actors.link import Link
from trioengine.actors.payload import Payload, PayloadBudget, Reservation
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.messages import PayloadConsumed
from trioengine.testing.fuzz.machine import Watch
from trioengine.testing.simulated_process import SimulatedMemfd, SimulatedPayload
from trioengine.testing.simulated_worker import Health
from trioengine.testing.simulation import Simulation


class SentPayloads:
    """The payloads that one engine sends."""

    def __init__(self, simulation: Simulation, crashes: list[Exception]) -> None:
        self._simulation = simulation
        self._crashes = crashes
        self._links: list[Link] = []  # of incarnations that are not lost
        self._on_their_way: dict[int, Link] = {}  # payload ids
        self._latest_id = 0
        self._passed: list[SimulatedPayload] = []  # descriptors that the engine has passed

    # ---- watched calls -------------------------------------------------------------------------------------------

    @property
    def watches(self) -> tuple[Watch, ...]:
        """All that is watched."""
        return (
            (Link, "__init__", self.of_links),
            (Link, "hand_over", self.of_handing_over),
            (Link, "on_consumed", self.of_consumption),
            (Link, "lose", self.of_losses),
            (SimulatedMemfd, "pass_on", self.of_descriptors),
        )

    def of_links(self, init: Any) -> Any:
        """For `Link.__init__`."""

        def watched(link: Link, *args: Any) -> None:
            init(link, *args)
            self._links.append(link)

        return watched

    def of_handing_over(self, hand_over: Any) -> Any:
        """For `Link.hand_over`: to an incarnation that is there, under an id of its own."""

        def watched(link: Link, payload_id: int, payload: Payload) -> None:
            if link not in self._links:
                self._complain(f"payload {payload_id} is handed to the link of a worker that was lost")
            if payload_id <= self._latest_id:
                self._complain(f"payload {payload_id} comes after {self._latest_id}")
            self._latest_id = payload_id
            self._on_their_way[payload_id] = link
            hand_over(link, payload_id, payload)

        return watched

    def of_consumption(self, on_consumed: Any) -> Any:
        """For `Link.on_consumed`: once for each payload on its way."""

        def watched(link: Link, message: PayloadConsumed) -> None:
            if self._on_their_way.pop(message.payload, None) is not link:
                self._complain(f"payload {message.payload} is consumed, and was not on its way")
            on_consumed(link, message)

        return watched

    def of_losses(self, lose: Any) -> Any:
        """For `Link.lose`: what was on its way is lost."""

        def watched(link: Link) -> None:
            self._links.remove(link)
            for payload_id in [id for id, owner in self._on_their_way.items() if owner is link]:
                del self._on_their_way[payload_id]
            lose(link)

        return watched

    def of_descriptors(self, pass_on: Any) -> Any:
        """For `SimulatedMemfd.pass_on`."""

        def watched(memfd: SimulatedMemfd) -> SimulatedPayload:
            payload: SimulatedPayload = pass_on(memfd)
            self._passed.append(payload)
            return payload

        return watched

    # ---- what must hold -------------------------------------------------------------------------------------------

    @property
    def pinned(self) -> Iterator[Payload]:
        """The payloads that links have, each as often as it is on its way."""
        for link in self._links:
            yield from link._payloads.values()

    def check(self) -> None:
        """After every rule: each link has its own, and each open descriptor is somewhere."""
        for link in self._links:
            due = {id for id, owner in self._on_their_way.items() if owner is link}
            assert link.payloads == due, f"the link has payloads {set(link.payloads)}, on their way are {due}"
        self._check_descriptors()

    def check_at_rest(self) -> None:
        """Nothing moves, and the worker is well: it has consumed everything."""
        assert not self._on_their_way, f"the worker never consumes payloads {set(self._on_their_way)}"

    def check_at_the_end(self) -> None:
        """The engine is over."""
        assert not self._on_their_way, f"payloads {set(self._on_their_way)} are neither consumed nor lost"

    def _check_descriptors(self) -> None:
        self._passed = [payload for payload in self._passed if payload.is_open]
        there = 0
        for worker in self._simulation.workers:
            found = len(worker.payloads) + sum(payload.is_open for payload in worker.open_payloads)
            assert not found or worker.health is not Health.DEAD, f"a dead worker has {found} payloads open"
            there += found
        assert len(self._passed) == there, f"{len(self._passed)} payloads are open in workers, which have {there}"

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))


class PayloadWatch:
    """All payloads of one engine.

    `stages` has the requests that are on their way in with images, by their tasks; `dropped` the bytes of images that
    were dropped while they were held.
    """

    def __init__(
        self, engine: Engine, simulation: Simulation, crashes: list[Exception], saw: Callable[[str], None]
    ) -> None:
        self.stages: dict[trio.lowlevel.Task, str] = {}
        self.dropped: set[bytes] = set()
        self.kept: list[KeptImages] = []  # and not released
        self._engine = engine
        self._simulation = simulation
        self._crashes = crashes
        self._saw = saw
        self._sent = SentPayloads(simulation, crashes)
        self._needs: dict[trio.lowlevel.Task, tuple[int, int]] = {}  # bytes and descriptors, of those in the line
        self._requests: WeakSet[RequestImages] = WeakSet()

    # ---- watched calls -------------------------------------------------------------------------------------------

    @property
    def watches(self) -> tuple[Watch, ...]:
        """All that is watched."""
        return (
            (RequestImages, "__init__", self.of_request_images),
            (RequestImages, "_reserve", self.of_waits),
            (RequestImages, "_making", self.of_making),
            (RequestImages, "_make", self.of_payloads),
            (RequestImages, "pin", self.of_pins),
            (RequestImages, "unpin", self.of_unpins),
            (KeptImages, "__init__", self.of_keeping),
            (KeptImages, "release", self.of_releases),
            (PayloadBudget, "reserve_now", self.of_reservations),
            (Payload, "drop", self.of_drops),
            *self._sent.watches,
        )

    def of_request_images(self, init: Any) -> Any:
        """For `RequestImages.__init__`."""

        def watched(images: RequestImages, *args: Any, **more: Any) -> None:
            init(images, *args, **more)
            self._requests.add(images)

        return watched

    def of_waits(self, reserve: Any) -> Any:
        """For `RequestImages._reserve`: who waits for room is refused only after MAX_WAIT seconds."""

        async def watched(images: RequestImages, num_bytes: int, count: int) -> Any:
            task, began = trio.lowlevel.current_task(), trio.current_time()
            self._needs[task] = num_bytes, count
            try:
                reservation = await reserve(images, num_bytes, count)
            except RequestRejected:
                self._saw("images are larger than the whole budget")
                raise
            except EngineOverloaded as exc:
                if images._wait is not False and trio.current_time() < began + MAX_WAIT:
                    self._complain(f"it waits for room, and got {exc!r}")
                raise
            finally:
                del self._needs[task]
                waited = self.stages.pop(task, None)
            if waited is not None:
                self._saw("a request waited for payload room")
            self.stages[task] = "while its images are sealed"
            return reservation

        return watched

    def of_making(self, making: Any) -> Any:
        """For `RequestImages._making`: there is memory for all images, unless the test has made seals fail."""

        @contextmanager
        def watched(images: RequestImages, reservation: Reservation) -> Iterator[Reservation]:
            made: AbstractContextManager[Reservation] = making(images, reservation)
            before = self._simulation.num_failed_seals
            try:
                with made:
                    yield reservation
            except EngineOverloaded as exc:
                self._saw("an image could not be sealed")
                if self._simulation.num_failed_seals == before:
                    self._complain(f"nothing failed, and {exc!r}")
                raise

        return watched

    def of_payloads(self, make: Any) -> Any:
        """For `RequestImages._make`."""

        def watched(images: RequestImages, *args: Any) -> list[Payload]:
            made: list[Payload] = make(images, *args)
            if (task := _current_task()) is not None:
                self.stages[task] = "with its images pinned"
            return made

        return watched

    def of_pins(self, pin: Any) -> Any:
        """For `RequestImages.pin`."""

        def watched(images: RequestImages, placed: Any) -> None:
            try:
                pin(images, placed)
            except RequestRejected:
                self._saw("a turn needs an image that was dropped")
                raise

        return watched

    def of_unpins(self, unpin: Any) -> Any:
        """For `RequestImages.unpin`."""

        def watched(images: RequestImages) -> None:
            if (task := _current_task()) is not None:
                self.stages.pop(task, None)
            unpin(images)

        return watched

    def of_keeping(self, init: Any) -> Any:
        """For `KeptImages.__init__`."""

        def watched(kept: KeptImages, *args: Any) -> None:
            init(kept, *args)
            self.kept.append(kept)

        return watched

    def of_releases(self, release: Any) -> Any:
        """For `KeptImages.release`, which is harmless when they were released."""

        def watched(kept: KeptImages) -> None:
            if kept in self.kept:
                self.kept.remove(kept)
            release(kept)

        return watched

    def of_reservations(self, reserve: Any) -> Any:
        """For `PayloadBudget.reserve_now`: a newcomer is refused where it has no room, or others wait."""

        def watched(budget: PayloadBudget, num_bytes: int, count: int) -> Any:
            is_full = bool(len(budget.line)) or not self._has_room(num_bytes, count)
            try:
                reservation = reserve(budget, num_bytes, count)
            except EngineOverloaded as exc:
                task = _current_task()
                if task is not None and task in self._needs:
                    self.stages[task] = "while it waits for payload room"
                if not is_full:
                    self._complain(f"there is room for {num_bytes} bytes, and {exc!r}")
                raise
            if len(budget.line):
                self._complain(f"a newcomer's {num_bytes} bytes are admitted, and {len(budget.line)} wait in the line")
            return reservation

        return watched

    def of_drops(self, drop: Any) -> Any:
        """For `Payload.drop`: what is held is dropped where its room is needed, and only there."""

        def watched(payload: Payload) -> None:
            budget = payload._budget
            if payload._num_holders:
                count = len(budget.payloads) + sum(each.count for each in budget._reservations)
                if budget.bytes_in_flight + budget.bytes_kept <= budget.max_bytes and count <= budget.max_count:
                    self._complain(f"{payload} is held, and dropped, and there is room")
                self._saw("a payload was dropped to make room")
                assert isinstance(payload.sealed, SimulatedMemfd), "made by the simulation"
                self.dropped.add(payload.sealed.data)
            drop(payload)

        return watched

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every rule: each open descriptor, pin and hold has an owner, and each owner has its own."""
        budget = self._engine.payloads
        budget.check()
        payloads = budget.payloads
        assert {*map(id, self._simulation.memfds)} == {id(payload.sealed) for payload in payloads}, (
            f"open are {len(self._simulation.memfds)} payloads, the budget has {payloads}"
        )
        pins, holds = self._pins(), self._holds()
        for payload in payloads:
            found = payload._num_pins, payload._num_holders
            assert found == (pins[payload], holds[payload]), (
                f"{payload} counts {found} pins and holders, there are {pins[payload]} and {holds[payload]}"
            )
        assert all(not payload.is_dropped for payload in pins), "a payload is pinned, and dropped"
        self._sent.check()
        self._check_reservations()

    def _check_reservations(self) -> None:
        making = sum(stage == "while its images are sealed" for stage in self.stages.values())
        found = len(self._engine.payloads._reservations)
        # a request that was served in the line has its reservation before it runs
        assert making <= found <= making + len(self._needs), f"{found} reservations, for {making} requests"

    def _pins(self) -> Counter[Payload]:
        pins = Counter(self._sent.pinned)
        for images in self._requests:
            pins.update(images._pinned)
        return pins

    def _holds(self) -> Counter[Payload]:
        """A session without a request holds the payloads of its conversation, and no others."""
        holds: Counter[Payload] = Counter()
        for kept in self.kept:
            holds.update(kept._payloads)
        for session in self._engine._sessions:
            holds.update(session._payloads)
            if session.generation is None and session._conversation is not None and session.end_cause is None:
                due = {payload_of(image) for image in session.conversation.images}
                assert {*session._payloads} == due, f"{session} holds {session._payloads}, its conversation has {due}"
        return holds

    def check_blocked(self) -> None:
        """No task can run: the first in the line has no room."""
        line = self._engine.payloads.line
        if len(line):
            first = self._needs[next(iter(line._waiters))]
            assert not self._has_room(*first), f"{len(line)} requests wait for room, and the first has room: {first}"

    def check_at_rest(self) -> None:
        """Nothing moves, and the worker is well: it has consumed all payloads but those of suspended requests."""
        budget = self._engine.payloads
        suspended = {payload for session in self._engine._sessions for payload in session._suspended_images._pinned}
        in_flight = budget.bytes_in_flight - sum(payload.num_bytes for payload in suspended)
        self._sent.check_at_rest()
        assert not in_flight, f"{in_flight} bytes of payloads are in flight, for nothing"
        assert suspended or not len(budget.line), f"{len(budget.line)} requests wait for room for payloads"

    def check_at_the_end(self) -> None:
        """The engine is over."""
        budget = self._engine.payloads
        found = len(self._simulation.memfds), budget.bytes_in_flight, budget.bytes_kept, len(budget.line)
        assert found == (0, 0, 0, 0), f"payloads, bytes in flight and kept, and waiting are {found} in the end"
        self._sent.check_at_the_end()

    def _has_room(self, num_bytes: int, count: int) -> bool:
        budget = self._engine.payloads
        pinned = [payload for payload in budget.payloads if payload.is_pinned]
        taken = sum(payload.num_bytes for payload in pinned) + sum(each.num_bytes for each in budget._reservations)
        num_taken = len(pinned) + sum(each.count for each in budget._reservations)
        return taken + num_bytes <= budget.max_bytes and num_taken + count <= budget.max_count

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))


def _current_task() -> trio.lowlevel.Task | None:
    """None in a rule, outside of all tasks."""
    return trio.lowlevel.current_task() if trio.lowlevel.in_trio_task() else None
