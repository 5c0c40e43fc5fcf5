"""The places of connections: how many there are at a time, and which connection makes room for a newcomer.

A connection that waits for its client (for a request's head, its body, or the next request) can make room. One that
lingers (it has its last answer, and is closed when its client has read it) makes room before all others. One whose
request is being handled, or that is a WebSocket, keeps its place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import trio

SHARE = 8  # an address whose waiting connections have more than this part of the places makes room first
MAX_LEAVING = 16  # connections that make room and are not closed yet


class Displaced(Exception):
    """A connection was closed while it waited for its client, or lingered: its place was needed."""


def network_of(host: str | None) -> str | None:
    """The address that a client has to itself: of IPv6 the first 64 bits, which is the least that a network gets."""
    if host is None:
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class Place:
    """One connection's. `address` is None where it is not known: all of these are one."""

    __slots__ = ("_places", "_scope", "address", "is_leaving")

    def __init__(self, places: Places, address: str | None) -> None:
        self.address = address
        self._places = places
        self.is_leaving = False  # it makes room for another
        self._scope: trio.CancelScope | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Within, the connection waits for its client. Raises Displaced if it has to make room."""
        return self._displaceable(self._places.add_waiting, self._places.remove_waiting)

    def lingering(self) -> AbstractContextManager[None]:
        """Within, the connection lingers. Raises Displaced if it has to make room."""
        return self._displaceable(self._places.add_lingering, self._places.remove_lingering)

    @contextmanager
    def _displaceable(self, add: Callable[[Place], None], remove: Callable[[Place], None]) -> Iterator[None]:
        with trio.CancelScope() as self._scope:
            add(self)
            try:
                yield
            finally:
                remove(self)
        if self.is_leaving:
            raise Displaced

    def displace(self) -> None:
        """Have the connection closed; it waits or lingers."""
        assert self._scope is not None, "only a connection that waits or lingers makes room"
        self.is_leaving = True
        self._scope.cancel()


class Places:
    """So many connections at a time, each from its acceptance until it is closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._share = max(1, count // SHARE)
        self._num_taken = 0
        self._num_leaving = 0
        self._lingering: dict[Place, None] = {}  # the oldest first
        self._waiting: dict[Place, None] = {}  # the one that has waited longest first
        self._of_addresses: dict[str | None, dict[Place, None]] = {}  # the same by address
        self._over_share: dict[str | None, None] = {}  # addresses

    @property
    def left(self) -> int:
        """How many are free; below 0 while connections that have made room are being closed."""
        return self.count - self._num_taken

    @contextmanager
    def take(self, address: str | None) -> Iterator[Place | None]:
        """A place within the block; None if all are taken, and no connection can make room."""
        if self.left <= 0 and not self._make_room(address):
            yield None
            return
        place = Place(self, address)
        self._num_taken += 1
        try:
            yield place
        finally:
            self._num_taken -= 1
            self._num_leaving -= place.is_leaving

    def add_lingering(self, place: Place) -> None:
        """The connection lingers from now on."""
        self._lingering[place] = None

    def remove_lingering(self, place: Place) -> None:
        """The connection is closed."""
        self._lingering.pop(place, None)  # None: it makes room

    def add_waiting(self, place: Place) -> None:
        """The connection waits for its client from now on."""
        self._waiting[place] = None
        of_address = self._of_addresses.setdefault(place.address, {})
        of_address[place] = None
        if len(of_address) > self._share:
            self._over_share[place.address] = None

    def remove_waiting(self, place: Place) -> None:
        """The connection waits no longer."""
        if place not in self._waiting:
            return  # it makes room
        del self._waiting[place]
        of_address = self._of_addresses[place.address]
        del of_address[place]
        if len(of_address) <= self._share:
            self._over_share.pop(place.address, None)
        if not of_address:
            del self._of_addresses[place.address]

    def _make_room(self, address: str | None) -> bool:
        """Displace a connection, if there are not too many that leave already."""
        place = next(iter(self._lingering or self._longest_waiting(address)), None)
        if place is None or self._num_leaving >= MAX_LEAVING:
            return False
        self.remove_lingering(place)
        self.remove_waiting(place)
        self._num_leaving += 1
        place.displace()
        return True

    def _longest_waiting(self, address: str | None) -> dict[Place, None]:
        """Those of which the first goes: of the newcomer's address, or another, over its share; or else all."""
        if address in self._over_share:
            return self._of_addresses[address]
        if self._over_share:
            return self._of_addresses[next(iter(self._over_share))]
        return self._waiting
