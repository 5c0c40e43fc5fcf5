"""The places of connections: how many there are at a time, and which connection makes room for a newcomer.

A connection that waits for its client (for a request's head, its body, or the next request) can make room. One that
lingers (it has its last answer, and is closed when its client has read it) makes room before all others. One whose
request is being handled, or that is a WebSocket, keeps its place.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import trio

from trioengine.actors.generation import Generation
from trioengine.serve.errors import RATE_LIMIT, SERVER_ERROR, OverBudget, Problem

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


RETRY_AFTER = 1.0  # seconds
ALWAYS_TAKEN = 1 << 10  # bytes of a WebSocket message that is handled also where there is no room: it may be a cancel


def size_of(text: str | bytes) -> int:
    """The bytes that a text takes in memory: of ASCII one a character, of another text four at most."""
    return len(text) if isinstance(text, bytes) or text.isascii() else 4 * len(text)


class ByteBudget:
    """The budgets of one server. What one Held has taken it gives back, at its end at the latest."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._of_keys: dict[bytes, int] = {}  # by the key's digest; none of them is 0

    @contextmanager
    def holding(self, key: bytes | None) -> Iterator[Held]:
        """Within, bytes are held for a client; without a key they count for the process alone."""
        held = Held(self, key)
        try:
            yield held
        finally:
            held.give_all_back()

    def check_room(self, key: bytes | None, size: int) -> None:
        """Raises OverBudget if so many more bytes are too many."""
        if key is not None and self._of_keys.get(key, 0) + size > self._max_bytes_per_key:
            limit = f"{self._max_bytes_per_key} bytes (--max-buffered-bytes-per-key)"
            message = f"the server buffers at most {limit} for the requests and connections of a key"
            raise OverBudget(429, Problem(RATE_LIMIT, "key_buffers_full", message, retry_after=RETRY_AFTER))
        if self.num_bytes + size > self._max_bytes:
            message = f"the server buffers at most {self._max_bytes} bytes (--max-buffered-bytes) for its clients"
            raise OverBudget(503, Problem(SERVER_ERROR, "buffers_full", message, retry_after=RETRY_AFTER))

    def add(self, key: bytes | None, size: int) -> None:
        """Count so many more bytes, or fewer if it is negative."""
        self.num_bytes += size
        if key is None or not size:
            return
        count = self._of_keys.pop(key, 0) + size
        if count:
            self._of_keys[key] = count


class Held:
    """The bytes that one request or connection holds."""

    __slots__ = ("_budget", "_key", "num_bytes")

    def __init__(self, budget: ByteBudget, key: bytes | None) -> None:
        self._budget = budget
        self._key = key
        self.num_bytes = 0

    def check_room(self, size: int) -> None:
        """Raises OverBudget if so many more bytes are too many."""
        self._budget.check_room(self._key, size)

    def take(self, size: int) -> None:
        """Reserve so many bytes, before they are kept. Raises OverBudget, and then takes none."""
        self.check_room(size)
        self.charge(size)

    def charge(self, size: int) -> None:
        """Count so many bytes that are kept in any case, as those of an answer; or fewer if it is negative."""
        self.num_bytes += size
        assert self.num_bytes >= 0, f"{-size} bytes are given back, {self.num_bytes + -size} were taken"
        self._budget.add(self._key, size)

    def give_back(self, size: int) -> None:
        """So many bytes are kept no longer."""
        self.charge(-size)

    def give_all_back(self) -> None:
        """Nothing is kept any more."""
        self.give_back(self.num_bytes)


class InFlight:
    """Requests of one server; an id that clients choose may be that of several."""

    def __init__(self) -> None:
        self._generations: dict[str, list[Generation]] = {}  # none is empty

    def __len__(self) -> int:
        """How many ids are known."""
        return len(self._generations)

    @contextmanager
    def running(self, ids: Iterable[str], generation: Generation) -> Iterator[None]:
        """Within, the request is known by these ids, of which some may be the same."""
        names = tuple(dict.fromkeys(ids))
        for id in names:
            self._generations.setdefault(id, []).append(generation)
        try:
            yield
        finally:
            for id in names:
                self._generations[id].remove(generation)
                if not self._generations[id]:
                    del self._generations[id]

    def abort(self, id: str) -> int:
        """Abort the requests of this id, and return how many this call aborts."""
        return sum(generation.abort() for generation in self._generations.get(id, ()))


logger = logging.getLogger("trioengine")
RESERVE = 64  # for the worker, files, listeners, and clients that are turned away


def raise_limit() -> None:
    """Take as many descriptors as the process may without asking anyone (`ulimit -n` to `ulimit -Hn`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a kernel may refuse even that; then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(max_connections: int) -> int:
    """As many connections, or fewer, so that the worker can still be started again; at least one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or max_connections <= soft - RESERVE:
        return max_connections
    limit = max(1, soft - RESERVE)
    logger.warning("at most %d connections: the process may have %d descriptors (ulimit -n)", limit, soft)
    return limit
