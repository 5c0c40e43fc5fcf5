"""Private state of the server, for the fuzzer, whose other modules read no private attributes of it.

Functions read its state; `ServerEvents` has the methods that are called while a machine runs within `tapped`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.actors.gate import Gate
from trioengine.actors.generation import Generation
from trioengine.actors.payload import Payload
from trioengine.core.errors import EngineError
from trioengine.core.types import Cause
from trioengine.serve import ids
from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ByteBudget, ConnectionSlot, InFlight
from trioengine.serve.realtime import connection, outbox
from trioengine.serve.realtime.connection import RealtimeConnection as RealtimeConnection
from trioengine.serve.realtime.events import Received
from trioengine.serve.realtime.item import FunctionCallItem, FunctionCallOutputItem, Item, MessageItem
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.realtime.requests import ResponseCancel
from trioengine.serve.realtime.response import Response as Response
from trioengine.serve.realtime.response import ResponseStatus
from trioengine.serve.server import Server
from trioengine.testing.fuzz import inside, inside_payloads
from trioengine.testing.fuzz.oracles import all_going
from trioengine.text.chat_tokenizer import image_parts

BETWEEN = 3072  # characters of other events, at most, between a check for room and a text or a call

# ---- the server -----------------------------------------------------------------------------------------------------


def num_going(server: Server) -> int:
    """The sessions with a window that are not over."""
    return sum(not session.is_over for session in server.realtime.sessions._sessions.values())


def set_max_buffered_bytes(server: Server, num_bytes: int) -> None:
    """Change the budget of bytes that the server keeps for its clients, and for the clients of one key."""
    server.budget._max_bytes = server.budget._max_bytes_per_key = num_bytes


def num_buffered_bytes(server: Server) -> int:
    """Bytes that the server keeps for its clients."""
    return server.budget.num_bytes


def connection_slots(server: Server) -> list[tuple[int, int]]:
    """How many connections fit, and how many more do now: of those that are served, and of those that are refused."""
    places = (server.connections._slots, server.connections._beyond)
    return [(each.count, each.left) for each in places]


def keys_in_use(server: Server) -> list[bytes]:
    """The digests of the keys for which the server counts requests or bytes."""
    return [*server.connections._access._sessions, *server.budget._of_keys]


def has_cut_connections(server: Server) -> bool:
    """Whether all connections were cancelled, because the time for their ends has passed."""
    return server._serving.cancel_called


def request_ids(server: Server) -> list[str]:
    """The ids by which clients know requests in flight."""
    return list(server.in_flight._generations)


# ---- Realtime connections -------------------------------------------------------------------------------------------


def has_gone(connection: RealtimeConnection) -> bool:
    """Whether the client of a connection has gone."""
    return connection._is_gone


def num_held_bytes(connection: RealtimeConnection) -> int:
    """Bytes that the server keeps for the client of a connection, beside events."""
    return connection._held.num_bytes - connection._outbox._size - connection._outbox._sent_size


def num_kept(connection: RealtimeConnection) -> int:
    """Characters of sent events that the server keeps for a client that was lost."""
    return connection._outbox._sent_size


def outlines(connection: RealtimeConnection) -> list[tuple[str, str, int, str]]:
    """The role, the text, the number of images and the id of a call of each item; a call that was cut is empty."""
    items = (connection._items._items[id] for id in connection._items._order)
    return [(item.role.value, *_outline(item)) for item in items]


def _outline(item: Item) -> tuple[str, int, str]:
    match item:
        case MessageItem():
            return item.text, len(item.parts) - len(item.texts), ""
        case FunctionCallItem() if item.is_empty:  # it was cut
            return "", 0, ""
        case FunctionCallItem():
            return item.arguments, 0, item.call_id
    assert isinstance(item, FunctionCallOutputItem), f"an item of another kind: {item}"
    return item.output, 0, item.call_id


def item_payloads(connection: RealtimeConnection) -> Iterator[Payload]:
    """The payloads of the images in a conversation."""
    return _payloads_in(item.message for item in connection._items._items.values())


def response_payloads(connection: RealtimeConnection) -> Iterator[Payload]:
    """The payloads of the images in the prompts of responses in progress."""
    for response in connection._active:
        if response.status is ResponseStatus.IN_PROGRESS:
            yield from _payloads_in(response.spec.messages)


def _payloads_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[Payload]:
    return (inside_payloads.payload(part.image) for part in image_parts(messages))


def goes_on(response: Response) -> bool:
    """Whether the request of a response has a slot and was not aborted."""
    generation = response.generation
    return generation is not None and inside.phase(inside.session_of(generation)) in inside.GOING


def is_in_progress(response: Response) -> bool:
    return response.status is ResponseStatus.IN_PROGRESS


def _to_cancel(connection: RealtimeConnection, event: ResponseCancel) -> Response | None:
    """The response that the event is for; without an id it is the conversation's."""
    running = connection._in_conversation.active
    if event.response_id is None:
        return running[0] if running else None
    found = (response for response in (*running, *connection._out_of_band.active) if response.id == event.response_id)
    return next(found, None)


# ---- taps -----------------------------------------------------------------------------------------------------------


class ServerEvents:
    """Base class: each method is called when something happens in the server, and does nothing unless overridden."""

    def error_logged(self, error: Exception) -> None:
        """The server logs a bug of its own."""

    def connection_displaced(self) -> None:
        """A connection is closed because a newcomer needs its slot."""

    def bytes_refused(self) -> None:
        """Bytes of a client exceed the budget."""

    def claiming(self, count: int) -> None:
        """From now on slots are taken for so many choices at once."""

    def claim_taken(self) -> None:
        """The present task takes the slots for a choice that were claimed."""

    def claim_refused(self) -> None:
        """The slots for the choices of a request are refused."""

    def aborted_by_id(self, generations: list[Generation], due: int, aborted: int) -> None:
        """An operator has aborted these; `due` of them had no outcome and were not aborted, `aborted` is the answer."""

    def all_aborted(self, due: int, aborted: int) -> None:
        """All requests were aborted; `due` of them had no outcome and were not aborted, `aborted` is the answer."""

    def connection_opened(self, connection: RealtimeConnection) -> None:
        """A Realtime connection begins."""

    def connection_closed(self, connection: RealtimeConnection) -> None:
        """A Realtime connection has ended."""

    def response_cancelled(self, response: Response) -> None:
        """The server has handled a response.cancel for this response."""

    def message_dropped(self) -> None:
        """A message of a client is dropped, because it exceeds the budget."""

    def event_put(self, size: int) -> None:
        """An event is about to be put into an outbox with so many characters."""

    def delta_put(self, size: int) -> None:
        """Text is about to be put into an outbox with so many characters, without those kept for one that is away."""

    def event_queued(self, prefix: str, size: int) -> None:
        """An event of so many characters is queued, whose id begins so."""


@contextmanager
def tapped(events: ServerEvents, *, room: int, at_once: int, kept: int) -> Iterator[None]:
    """Within, report events of servers; outboxes have room for so many characters, send and keep so many at once."""
    taps: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (ConnectionSlot, "displace", inside.before(lambda _: events.connection_displaced())),
        (ByteBudget, "check_room", lambda check: _check_room(events, check)),
        (Gate, "claiming", lambda claiming: _claiming(events, claiming)),
        (InFlight, "abort", lambda abort: _abort(events, abort)),
        (Engine, "abort_all", lambda abort_all: _abort_all(events, abort_all)),
        (RealtimeConnection, "run", lambda run: _run(events, run)),
        (RealtimeConnection, "_act", lambda act: _act(events, act)),
        (RealtimeConnection, "_give_up", inside.before(lambda *_: events.message_dropped())),
        (Outbox, "put", inside.before(lambda outbox, *_, **__: events.event_put(outbox._size))),
        (Outbox, "put_delta", inside.before(lambda outbox, *_: events.delta_put(outbox._size - outbox._max_kept))),
        (Outbox, "_put", inside.before(lambda outbox, text: events.event_queued(outbox._event_id, len(text)))),
        (outbox, "ROOM", lambda _: room),
        (connection, "MAX_KEPT", lambda _: kept),
        (outbox, "AT_ONCE", lambda _: at_once),
        (ids, "random_hex", lambda _: map("{:024x}".format, itertools.count()).__next__),
        (ids, "_clock", lambda _: lambda: 0.0),
    )
    with ExitStack() as stack, inside.errors_logged("serve", events.error_logged):
        for owner, name, mutate in taps:
            stack.enter_context(inside.replaced(owner, name, mutate))
        yield


def _check_room(events: ServerEvents, check: Any) -> Any:
    def tap(budget: ByteBudget, key: bytes | None, size: int) -> None:
        try:
            check(budget, key, size)
        except OverBudget:
            events.bytes_refused()
            raise

    return tap


def _claiming(events: ServerEvents, claiming: Any) -> Any:
    @contextmanager
    def tap(gate: Gate, count: int) -> Iterator[Callable[[], None]]:
        with ExitStack() as stack:
            events.claiming(count)
            try:
                give_up = stack.enter_context(claiming(gate, count))
            except EngineError:
                events.claim_refused()
                raise
            finally:
                events.claiming(1)

            def taking() -> None:
                events.claim_taken()
                give_up()

            yield taking

    return tap


def _abort(events: ServerEvents, abort: Any) -> Any:
    def tap(in_flight: InFlight, id: str) -> int:
        generations = list(in_flight._generations.get(id, ()))
        due = sum(
            generation.outcome is None and (not inside.is_in_flight(generation) or inside.is_going(generation))
            for generation in generations
        )
        aborted: int = abort(in_flight, id)
        events.aborted_by_id(generations, due, aborted)
        return aborted

    return tap


def _abort_all(events: ServerEvents, abort_all: Any) -> Any:
    def tap(engine: Engine, *cause: Cause, keep_waiting: bool = False) -> int:
        due = len(all_going(engine, with_waiting=not keep_waiting))
        aborted: int = abort_all(engine, *cause, keep_waiting=keep_waiting)
        if not cause:  # with one the server ends
            events.all_aborted(due, aborted)
        return aborted

    return tap


def _run(events: ServerEvents, run: Any) -> Any:
    async def tap(connection: RealtimeConnection) -> None:
        events.connection_opened(connection)
        try:
            await run(connection)
        finally:
            events.connection_closed(connection)

    return tap


def _act(events: ServerEvents, act: Any) -> Any:
    def tap(connection: RealtimeConnection, received: Received) -> None:
        event = received.event
        response = _to_cancel(connection, event) if isinstance(event, ResponseCancel) else None
        act(connection, received)
        if response is not None:
            events.response_cancelled(response)

    return tap
