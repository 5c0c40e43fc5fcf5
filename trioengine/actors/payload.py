"""Payloads: the bytes of images, outside of this process's memory, and the budget that bounds them.

A payload is a sealed memfd. It is *pinned* while a request that needs it is prepared, from the commit until the worker
has consumed it or is lost, and while the request is suspended; then it is kept for later turns as long as a
conversation *holds* it. Kept payloads make room for new ones, the least recently used first; pinned payloads are never
dropped. Without pins and holders a payload is closed. Everything here is synchronous, and every byte is given back
once. See docs/decisions/029.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from trioengine.actors.media import SealedBytes
from trioengine.actors.observer import Observer
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.errors import EngineOverloaded, InvariantError, RequestRejected
from trioengine.core.image import ImageInfo


class Payload:
    """One image's bytes. Its maker has the first pin."""

    __slots__ = ("_budget", "_num_holders", "_num_pins", "_sealed", "digest", "info", "num_bytes")

    def __init__(self, budget: PayloadBudget, sealed: SealedBytes, info: ImageInfo, digest: bytes) -> None:
        self.info = info
        self.digest = digest  # of the bytes, under the engine's secret
        self.num_bytes = sealed.num_bytes
        self._budget = budget
        self._sealed: SealedBytes | None = sealed
        self._num_holders = 0
        self._num_pins = 1

    def __repr__(self) -> str:
        image = f"{self.info.format} {self.info.width} x {self.info.height}"
        return f"<Payload {image}, {self.num_bytes} bytes{', dropped' if self.is_dropped else ''}>"

    @property
    def is_dropped(self) -> bool:
        """Whether its bytes are gone."""
        return self._sealed is None

    @property
    def is_pinned(self) -> bool:
        return self._num_pins > 0

    @property
    def sealed(self) -> SealedBytes:
        """The bytes, of a payload that is pinned."""
        assert self._sealed is not None, "a pinned payload has its bytes"
        return self._sealed

    def hold(self) -> None:
        """A conversation refers to it: its bytes are kept as long as there is room."""
        self._num_holders += 1

    def release(self) -> None:
        """A conversation refers to it no longer."""
        self._num_holders -= 1
        self._settle()

    def pin(self) -> None:
        """Keep its bytes, which are there, until `unpin`."""
        assert self._sealed is not None, "only a payload with bytes is pinned"
        self._num_pins += 1
        self._budget.use(self)

    def unpin(self) -> None:
        self._num_pins -= 1
        self._settle()

    def _settle(self) -> None:
        assert self._num_pins >= 0 and self._num_holders >= 0, "given back once"
        if self._sealed is not None and not self._num_pins:
            if self._num_holders:
                self._budget.use(self)
            else:
                self.drop()
            self._budget.line.serve()

    def drop(self) -> None:
        """Close the bytes of a payload without pins."""
        sealed, self._sealed = self.sealed, None
        sealed.close()
        self._budget.forget(self)


class Reservation:
    """Bytes and descriptors of the budget for payloads that are being made."""

    def __init__(self, budget: PayloadBudget, num_bytes: int, count: int) -> None:
        self.num_bytes = num_bytes
        self.count = count
        self._budget = budget

    def make(self, sealed: SealedBytes, info: ImageInfo, digest: bytes, num_reserved: int) -> Payload:
        """The payload of these bytes, pinned; `num_reserved` were reserved for it, which is at least its size."""
        self.num_bytes -= num_reserved
        self.count -= 1
        return self._budget.add(Payload(self._budget, sealed, info, digest))

    def give_back(self) -> None:
        """Give back the rest of the reservation."""
        self.num_bytes = self.count = 0
        self._budget.end(self)


class PayloadBudget:
    """Bytes and descriptors of all payloads of one engine.

    Callers wait for room in `line`, where their admission is `reserve`. Newcomers call `reserve_now`: there may be room
    for a small one of them while the first in the line waits for more.
    """

    def __init__(self, max_bytes: int, max_count: int, observers: Sequence[Observer] = ()) -> None:
        self.line = WaitingLine(observers)
        self.max_bytes = max_bytes
        self.max_count = max_count
        self._payloads: OrderedDict[Payload, None] = OrderedDict()  # with bytes; the least recently used first
        self._reservations: set[Reservation] = set()

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """The payloads whose bytes are there."""
        return tuple(self._payloads)

    @property
    def bytes_in_flight(self) -> int:
        """Of payloads that are being made, are on their way to the worker, or belong to suspended requests."""
        reserved = sum(reservation.num_bytes for reservation in self._reservations)
        return reserved + sum(payload.num_bytes for payload in self._payloads if payload.is_pinned)

    @property
    def bytes_kept(self) -> int:
        """Of payloads that are kept for later turns."""
        return sum(payload.num_bytes for payload in self._payloads if not payload.is_pinned)

    def reserve(self, num_bytes: int, count: int) -> Reservation:
        """Take room for `count` payloads, dropping kept payloads for it.

        Raises RequestRejected if they are larger than the whole budget, EngineOverloaded if they do not fit now.
        """
        self._check_size(num_bytes, count)
        self._check_room(num_bytes, count)
        reservation = Reservation(self, num_bytes, count)
        self._reservations.add(reservation)
        self._make_room()
        return reservation

    def reserve_now(self, num_bytes: int, count: int) -> Reservation:
        """As `reserve`, for a newcomer, which has to wait while others do."""
        self._check_size(num_bytes, count)
        if num_waiting := len(self.line):
            raise _full(num_bytes, f"{num_waiting} requests wait for room")
        return self.reserve(num_bytes, count)

    def _check_room(self, num_bytes: int, count: int) -> None:
        in_flight = self.bytes_in_flight
        if in_flight + num_bytes > self.max_bytes:
            raise _full(num_bytes, f"requests hold {in_flight} of {self.max_bytes} bytes")
        num_in_flight = sum(payload.is_pinned for payload in self._payloads) + self._num_reserved
        if num_in_flight + count > self.max_count:
            raise _full(num_bytes, f"requests hold {num_in_flight} of {self.max_count} images")

    def _check_size(self, num_bytes: int, count: int) -> None:
        if num_bytes > self.max_bytes:
            raise RequestRejected(
                "too_large", f"the images have {num_bytes} bytes, and the engine takes at most {self.max_bytes}"
            )
        if count > self.max_count:
            raise RequestRejected("too_large", f"{count} images, and the engine takes at most {self.max_count} at once")

    def _make_room(self) -> None:
        """Drop kept payloads, the least recently used first, until all fit the budget."""
        excess_bytes = self.bytes_in_flight + self.bytes_kept - self.max_bytes
        excess = len(self._payloads) + self._num_reserved - self.max_count
        for payload in [payload for payload in self._payloads if not payload.is_pinned]:
            if excess_bytes <= 0 and excess <= 0:
                return
            excess_bytes -= payload.num_bytes
            excess -= 1
            payload.drop()

    @property
    def _num_reserved(self) -> int:
        return sum(reservation.count for reservation in self._reservations)

    def add(self, payload: Payload) -> Payload:
        self._payloads[payload] = None
        return payload

    def use(self, payload: Payload) -> None:
        """It is the latest to have been used."""
        self._payloads.move_to_end(payload)

    def forget(self, payload: Payload) -> None:
        del self._payloads[payload]

    def end(self, reservation: Reservation) -> None:
        self._reservations.discard(reservation)
        self.line.serve()

    def check(self) -> None:
        """Raise InvariantError unless the budget is kept, and each payload is pinned or held."""
        total = self.bytes_in_flight + self.bytes_kept
        if total > self.max_bytes:
            raise InvariantError(f"payloads have {total} bytes, and the budget is {self.max_bytes}")
        for payload in self._payloads:
            if not payload.is_pinned and not payload._num_holders:
                raise InvariantError(f"{payload} is kept, and no conversation holds it")


def _full(num_bytes: int, reason: str) -> EngineOverloaded:
    return EngineOverloaded(f"images of {num_bytes} bytes have to wait: {reason}", code="payloads", is_full=True)
