"""Limits of a server: slots for connections, budgets for bytes, and the requests in flight by their ids.

A connection that waits for its client (for the next request, the rest of its head, or of its body) can make room for
another. The one that has waited longest goes first; each of these three waits begins anew. One that lingers (it has
sent its last response, and is closed when its client has read it) makes room before all others. One whose request is
being handled, or that is a WebSocket, keeps its slot.

The bytes that the server keeps for clients are counted for the process and for each key: bodies of requests, from the
first byte until the engine has the prompt, long responses with token ids, log-probabilities or an echo (see
`response_bytes`), and of each WebSocket connection the messages on their way and unhandled, its conversation,
instructions and tools, the input of its responses, and unsent events.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import trio

from trioengine.actors.generation import Generation
from trioengine.serve.errors import RATE_LIMIT, SERVER_ERROR, OverBudget, Problem

logger = logging.getLogger("trioengine")
SHARE = 8  # an address whose waiting connections have more than this part of the slots makes room first
MAX_LEAVING = 16  # connections that make room and are not closed yet
RESERVE = 64  # file descriptors for the worker, files, listeners, and connections beyond the limit
RETRY_AFTER = 1.0  # seconds
VALUE_SIZE = 64  # bytes of memory of a value of JSON, beside its text and the values in it
VALUE_MARKS = "[{,:"  # in JSON, each but the first value follows one of them
ALWAYS_TAKEN = 1 << 10  # bytes of a WebSocket message that is handled even beyond the budget: it may be a cancel


# ---- connections --------------------------------------------------------------------------------------------------


class Displaced(Exception):
    """A connection is closed while it waits for its client, or lingers, because its slot is needed."""


class ConnectionSlot:
    """The slot of one connection. All connections of unknown `address` (None) count as one address."""

    __slots__ = ("_scope", "_slots", "address", "is_leaving")

    def __init__(self, slots: ConnectionSlots, address: str | None) -> None:
        self.address = address
        self._slots = slots
        self.is_leaving = False  # it makes room for another
        self._scope: trio.CancelScope | None = None

    def waiting(self, deadline: float) -> AbstractContextManager[trio.CancelScope]:
        """Mark the connection as waiting for its client. Raises Displaced if it has to make room.

        Raises TooSlowError when the deadline passes, on trio's clock, or the scope is cancelled.
        """
        return self._displaceable(self._slots.add_waiting, self._slots.remove_waiting, deadline)

    def lingering(self) -> AbstractContextManager[trio.CancelScope]:
        """Mark the connection as lingering. Raises Displaced if it has to make room."""
        return self._displaceable(self._slots.add_lingering, self._slots.remove_lingering, math.inf)

    @contextmanager
    def _displaceable(
        self, add: Callable[[ConnectionSlot], None], remove: Callable[[ConnectionSlot], None], deadline: float
    ) -> Iterator[trio.CancelScope]:
        with trio.CancelScope(deadline=deadline) as scope:
            self._scope = scope
            add(self)
            try:
                yield scope
            finally:
                remove(self)
        if self.is_leaving:
            raise Displaced
        if scope.cancelled_caught:
            raise trio.TooSlowError

    def displace(self) -> None:
        """Close the connection, which waits or lingers."""
        assert self._scope is not None, "only a connection that waits or lingers makes room"
        self.is_leaving = True
        self._scope.cancel()


class ConnectionSlots:
    """Slots for `count` connections at a time, each from its acceptance until it is closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._share = max(1, count // SHARE)
        self._num_taken = 0
        self._num_leaving = 0
        self._lingering: dict[ConnectionSlot, None] = {}  # the oldest first
        self._waiting: dict[ConnectionSlot, None] = {}  # the one that has waited longest first
        self._of_addresses: dict[str | None, dict[ConnectionSlot, None]] = {}  # the same by address
        self._over_share: dict[str | None, None] = {}  # addresses

    @property
    def left(self) -> int:
        """The number of free slots; below 0 while connections that have made room are being closed."""
        return self.count - self._num_taken

    @contextmanager
    def take(self, address: str | None) -> Iterator[ConnectionSlot | None]:
        """Take a slot for the block; None if all are taken, and no connection can make room."""
        if self.left <= 0 and not self._make_room(address):
            yield None
            return
        slot = ConnectionSlot(self, address)
        self._num_taken += 1
        try:
            yield slot
        finally:
            self._num_taken -= 1
            self._num_leaving -= slot.is_leaving

    def add_lingering(self, slot: ConnectionSlot) -> None:
        self._lingering[slot] = None

    def remove_lingering(self, slot: ConnectionSlot) -> None:
        self._lingering.pop(slot, None)  # it is absent if it makes room

    def add_waiting(self, slot: ConnectionSlot) -> None:
        self._waiting[slot] = None
        of_address = self._of_addresses.setdefault(slot.address, {})
        of_address[slot] = None
        if len(of_address) > self._share:
            self._over_share[slot.address] = None

    def remove_waiting(self, slot: ConnectionSlot) -> None:
        if slot not in self._waiting:
            return  # it makes room
        del self._waiting[slot]
        of_address = self._of_addresses[slot.address]
        del of_address[slot]
        if len(of_address) <= self._share:
            self._over_share.pop(slot.address, None)
        if not of_address:
            del self._of_addresses[slot.address]

    def _make_room(self, address: str | None) -> bool:
        """Displace a connection, unless too many are leaving already."""
        slot = next(iter(self._lingering or self._longest_waiting(address)), None)
        if slot is None or self._num_leaving >= MAX_LEAVING:
            return False
        self.remove_lingering(slot)
        self.remove_waiting(slot)
        self._num_leaving += 1
        slot.displace()
        return True

    def _longest_waiting(self, address: str | None) -> dict[ConnectionSlot, None]:
        """Return the group whose first goes: the newcomer's address, or another, over its share; or else all."""
        if address in self._over_share:
            return self._of_addresses[address]
        if self._over_share:
            return self._of_addresses[next(iter(self._over_share))]
        return self._waiting


@lru_cache(1024)
def network_of(host: str | None) -> str | None:
    """Return the address that a client has to itself: of IPv6 the first 64 bits, the least that a network gets."""
    if host is None:
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def clamp_to_fd_limit(max_connections: int) -> int:
    """Reduce a number of connections so that descriptors remain to restart the worker; at least one connection."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or max_connections <= soft - RESERVE:
        return max_connections
    limit = max(1, soft - RESERVE)
    logger.warning("at most %d connections: the process may have %d descriptors (ulimit -n)", limit, soft)
    return limit


# ---- bytes --------------------------------------------------------------------------------------------------------


def size_of(text: str | bytes) -> int:
    """Return the bytes that a text takes in memory: one per character of ASCII, of another text at most four."""
    return len(text) if isinstance(text, bytes) or text.isascii() else 4 * len(text)


def size_of_json(value: object) -> int:
    """Return the bytes that a value of JSON takes in memory, about."""
    size, values = 0, [value]
    while values:
        value = values.pop()
        size += VALUE_SIZE
        if isinstance(value, str):
            size += size_of(value)
        elif isinstance(value, Mapping):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            values += value
    return size


def size_of_json_text(text: str) -> int:
    """Return the bytes that a text takes in memory together with the value whose JSON it is, at most about.

    Marks within strings count as well, so that nothing has to be read.
    """
    return size_of(text) + VALUE_SIZE * (1 + sum(map(text.count, VALUE_MARKS)))


class ByteBudget:
    """The budgets of one server. The bytes taken by a Held are given back at its end at the latest."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._of_keys: dict[bytes, int] = {}  # by the key's digest; none is 0

    @contextmanager
    def holding(self, key: bytes | None) -> Iterator[Held]:
        """Hold bytes for a client within the block; without a key they count for the process alone."""
        held = Held(self, key)
        try:
            yield held
        finally:
            held.give_all_back()

    def check_room(self, key: bytes | None, size: int) -> None:
        """Raise OverBudget if `size` more bytes are too many."""
        if key is not None and self._of_keys.get(key, 0) + size > self._max_bytes_per_key:
            limit = f"{self._max_bytes_per_key} bytes (--max-buffered-bytes-per-key)"
            message = f"the server buffers at most {limit} for the requests and connections of a key"
            raise OverBudget(429, Problem(RATE_LIMIT, "key_buffers_full", message, retry_after=RETRY_AFTER))
        if self.num_bytes + size > self._max_bytes:
            message = f"the server buffers at most {self._max_bytes} bytes (--max-buffered-bytes) for its clients"
            raise OverBudget(503, Problem(SERVER_ERROR, "buffers_full", message, retry_after=RETRY_AFTER))

    def add(self, key: bytes | None, size: int) -> None:
        """Count `size` more bytes, or fewer if it is negative."""
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
        """Raise OverBudget if `size` more bytes are too many."""
        self._budget.check_room(self._key, size)

    def take(self, size: int) -> None:
        """Reserve bytes before they are kept. Raises OverBudget, and then takes none."""
        self._budget.check_room(self._key, size)
        self.charge(size)

    def charge(self, size: int) -> None:
        """Count bytes that are kept in any case, such as a response's; fewer if `size` is negative."""
        self.num_bytes += size
        assert self.num_bytes >= 0, f"{-size} bytes are given back, {self.num_bytes + -size} were taken"
        self._budget.add(self._key, size)

    def give_back(self, size: int) -> None:
        self.charge(-size)

    def give_all_back(self) -> None:
        self.charge(-self.num_bytes)


# ---- requests in flight -------------------------------------------------------------------------------------------


class InFlight:
    """The requests of one server by id, the server's and the client's; clients may give one id to several requests."""

    def __init__(self) -> None:
        self._generations: dict[str, list[Generation]] = {}  # none is empty

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._generations)

    @contextmanager
    def running(self, ids: Iterable[str], generation: Generation) -> Iterator[None]:
        """Register a request under these ids, which may repeat, for the block."""
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
