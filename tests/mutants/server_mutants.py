"""Mutants of the server: the effects of a client on the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio
from mutant import Mutant, replaced
from trio_websocket import ConnectionClosed
from wsproto.events import TextMessage

from trioengine.serve.body import Body
from trioengine.serve.connection import ConnectionHandler
from trioengine.serve.http_connection import HttpConnection
from trioengine.serve.limits import ByteBudget, Held
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.item import Item
from trioengine.serve.realtime.items import Items
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.websocket import AcceptedWebSocket

_sender: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("sender")


class _InTurn:
    """A WebSocket on which messages are sent when those before them, on any, are sent."""

    def __init__(self, websocket: AcceptedWebSocket, lock: trio.Lock) -> None:
        self._websocket = websocket
        self._lock = lock

    async def send(self, messages: Sequence[TextMessage]) -> None:
        async with self._lock:
            await self._websocket.send(messages)


def _one_sender_for_all(send_to: Any) -> Any:
    async def mutant(self: Outbox, websocket: AcceptedWebSocket) -> None:
        try:
            lock = _sender.get()
        except LookupError:
            _sender.set(lock := trio.Lock())
        await send_to(self, _InTurn(websocket, lock))

    return mutant


def _room_for_everything(room: Any) -> Any:
    async def mutant(self: Outbox) -> None:
        await trio.lowlevel.checkpoint()

    return mutant


def _let_closes_out(handle: Any) -> Any:
    async def mutant(self: ConnectionHandler, stream: trio.abc.Stream, serve: Any) -> None:
        closes: list[Exception] = []

        async def watched(stream: trio.abc.Stream) -> None:
            try:
                await serve(stream)
            except* (ConnectionClosed, trio.BrokenResourceError) as group:
                closes.append(group)

        await handle(self, stream, watched)
        if closes:
            raise closes[0]

    return mutant


def _watch_nobody(watch: Any) -> Any:
    async def mutant(self: HttpConnection, body: Body) -> None:
        await trio.sleep_forever()

    return mutant


def _give_back_after_success(holding: Any) -> Any:
    @contextmanager
    def mutant(self: ByteBudget, key: bytes | None) -> Iterator[Held]:
        held = Held(self, key)
        yield held
        held.give_back(held.num_bytes)

    return mutant


def _count_first_cuts(truncate: Any) -> Any:
    def mutant(self: Items, id: object, *place: object) -> Item:
        size, status = self._size, self.get(id, "item_id").status
        item: Item = truncate(self, id, *place)
        if item.status is status:
            self._count(size - self._size)
        return item

    return mutant


def _forget_the_next(begin_next: Any) -> Any:
    def mutant(self: RealtimeConnection) -> None:
        self._drop_next()

    return mutant


SERVER_MUTANTS = (
    Mutant(
        "F24",
        "a slow client stalls everyone",
        replaced(Outbox, "send_to", _one_sender_for_all),
        shows="never answered|never end|have come|hears|has sent no close frame",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F24b",
        "a slow client fills memory",
        replaced(Outbox, "room", _room_for_everything),
        shows="are kept for a slow client",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F28c",
        "the bytes of a client that goes away are counted on",
        replaced(ByteBudget, "holding", _give_back_after_success),
        shows="bytes are kept for them|the server buffers at most",
        machine="HttpMachine",
    ),
    Mutant(
        "F32",
        "a client that waits for a whole answer leaves, and nobody notices",
        replaced(HttpConnection, "_watch_client", _watch_nobody),
        shows="go on for . clients|connections never end",
        machine="HttpMachine",
    ),
    Mutant(
        "F36",
        "an abrupt close of a WebSocket crashes the server",
        replaced(ConnectionHandler, "_handle", _let_closes_out),
        shows="ConnectionClosed|BrokenResourceError",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F70",
        "the text that an incomplete answer loses is counted on",
        replaced(Items, "truncate", _count_first_cuts),
        shows="bytes are counted",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F71",
        "a response that is asked for right after a cancel never begins",
        replaced(RealtimeConnection, "_begin_next", _forget_the_next),
        shows="never answered|was asked for",
        machine="RealtimeMachine",
    ),
)
