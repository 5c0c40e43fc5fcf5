"""Payloads on their way to the worker, watched from the link that has them to their end: consumed once, or lost once.

Each method `of_…` is a `mutate` for `Machine._watch`; `watches` has them all. What is seen wrong is added to the
crashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trioengine.actors.link import Link
from trioengine.actors.payload import Payload
from trioengine.core.messages import PayloadConsumed
from trioengine.testing.fuzz.machine import Watch
from trioengine.testing.simulated_payload import SimulatedMemfd, SimulatedPayload
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
