"""The events to a client: a queue with back-pressure, and events about the state of the engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import trio
from trio_websocket import ConnectionClosed
from wsproto.events import TextMessage

from trioengine.actors.engine import Engine
from trioengine.aio.concurrency import Notifier
from trioengine.core.lifecycle import Power
from trioengine.serve.errors import ClientError, Problem
from trioengine.serve.ids import new_id
from trioengine.serve.limits import Held
from trioengine.serve.realtime.settings import input_modalities
from trioengine.serve.websocket import AcceptedWebSocket

ROOM = 1 << 16  # unsent characters beyond which `room` waits
PART = 1 << 16  # characters; longer events are sent in parts, each with its own timeout
EVENT_FACTOR = 6  # bytes of JSON, at most, for each byte of memory of a text in an event
AT_ONCE = 1 << 12  # characters of small events in one write; few, so that pings are not delayed behind them

AWAKE = "awake"
SHOWN: Mapping[Power, str] = {  # the state in an engine.state event
    Power.LOADING: "loading",
    Power.AWAKE: AWAKE,
    Power.RESTARTING: "restarting",
    Power.FALLING_ASLEEP: "sleeping",
    Power.ASLEEP: "sleeping",
    Power.WAKING: "sleeping",  # until all tags are awake
    Power.UPDATING: "updating",
    Power.DRAINING: "draining",
    Power.CLOSED: "draining",
}


class DeltaTemplate:
    """Renders the fixed fields of events once, which then differ in their `delta`."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.head = json.dumps({"type": name, **fields})[:-1] + ', "delta": '


class Outbox:
    """Numbers events and queues them without waiting; one task sends them. Producers await `room` before they put more.

    A client that reads nothing for `send_timeout` seconds is disconnected. `held` accounts for the bytes. Events that
    were sent are kept, the newest ones, as long as they and the unsent ones have at most `max_kept` characters: after
    `detach` the same events may be sent to another connection.
    """

    def __init__(self, send_timeout: float, held: Held, max_kept: int = 0) -> None:
        self.held = held
        self._send_timeout = send_timeout
        self._max_kept = max_kept
        self._event_id = new_id("event_")  # a prefix of event ids
        self._unsent: deque[TextMessage] = deque()  # long ones in parts
        self._sending: list[TextMessage] = []
        self._size = 0  # characters, which are ASCII, of these and of the events being sent
        self._sent: deque[TextMessage] = deque()  # kept
        self._sent_size = 0  # characters
        self._sequence_number = 0  # of the next event that is put
        self._num_sent = 0  # events that were sent whole
        self._oldest = 0  # number of the oldest event that can be sent again, or for the first time
        self._num_detached = 0
        self._is_attached = True
        self._changes = Notifier()

    def put(self, name: str, /, **fields: Any) -> None:
        """Queue an event of type `name`."""
        event_id, number = self._next_id()
        self._put(json.dumps({"event_id": event_id, "type": name, "sequence_number": number, **fields}))

    def put_delta(self, template: DeltaTemplate, delta: str) -> None:
        """Queue an event of the template with this text."""
        event_id, number = self._next_id()
        text = json.dumps(delta)
        self._put(f'{template.head}{text}, "event_id": "{event_id}", "sequence_number": {number}}}')

    def _next_id(self) -> tuple[str, int]:
        return f"{self._event_id}_{self._sequence_number}", self._sequence_number

    def _put(self, text: str) -> None:
        self._sequence_number += 1
        for start in range(0, len(text), PART):
            part = text[start : start + PART]
            self._unsent.append(TextMessage(part, message_finished=start + PART >= len(text)))
        self._size += len(text)
        self.held.charge(len(text))
        self._trim()
        self._changes.notify()

    def put_error(self, problem: Problem, event_id: str | None) -> None:
        """Queue an error event; `event_id` names the client's event that caused it."""
        self.put("error", error={**problem.to_json(), "event_id": event_id})

    async def room(self) -> None:
        """Wait until the client has read enough for more; without a client, do not wait."""
        await trio.lowlevel.checkpoint()
        while self._is_attached and self._size > ROOM:
            await self._changes.wait()

    async def flushed(self) -> None:
        """Wait until all events are sent."""
        while self._size:
            await self._changes.wait()

    async def changed(self) -> None:
        """Wait until an event is put or sent, or a client comes or goes."""
        await self._changes.wait()

    # ---- sending --------------------------------------------------------------------------------------------------

    async def send_to(self, websocket: AcceptedWebSocket) -> None:
        """Send until cancelled, until the WebSocket is closed, or until the first write that ends after `detach`.

        Raises TooSlowError when the client does not read.
        """
        num_detached = self._num_detached
        while True:
            while not self._unsent:
                await self._changes.wait()
                if self._num_detached != num_detached:
                    return
            messages = self._sending = self._next()
            try:
                with trio.fail_after(self._send_timeout):
                    await websocket.send(messages)
            except ConnectionClosed:
                return
            if self._num_detached != num_detached:
                return
            self._sending = []
            self._record_sent(messages)
            self._changes.notify()

    def _next(self) -> list[TextMessage]:
        """Dequeue the events of one write: the first, and more if they are small."""
        messages = [self._unsent.popleft()]
        size = len(messages[0].data)
        while self._unsent and (size := size + len(self._unsent[0].data)) <= AT_ONCE:
            messages.append(self._unsent.popleft())
        return messages

    def _record_sent(self, messages: Sequence[TextMessage]) -> None:
        """Keep the messages that were sent, except parts of an event whose beginning was dropped."""
        for message in messages:
            size = len(message.data)
            self._size -= size
            if self._num_sent >= self._oldest:
                self._sent.append(message)
                self._sent_size += size
            else:
                self.held.give_back(size)
            self._num_sent += message.message_finished
        self._trim()

    def _trim(self) -> None:
        """Drop the oldest of the sent events while there are too many characters."""
        while self._sent and self._size + self._sent_size > self._max_kept:
            self._oldest += 1
            is_whole = False
            while self._sent and not is_whole:
                message = self._sent.popleft()
                is_whole = message.message_finished
                self._sent_size -= len(message.data)
                self.held.give_back(len(message.data))

    # ---- another connection ---------------------------------------------------------------------------------------

    @property
    def is_overfull(self) -> bool:
        """Whether the unsent events are more than may be kept for a client that is away."""
        return self._size > self._max_kept

    def detach(self) -> None:
        """Stop sending: the client is gone. The events that were being sent are unsent again."""
        self._num_detached += 1
        self._is_attached = False
        self._unsent.extendleft(reversed(self._sending))
        self._sending = []
        if self._num_sent < self._oldest:  # the beginning of the first was sent and dropped
            self._drop_first()
        self._changes.notify()

    def _drop_first(self) -> None:
        """Drop the rest of the first unsent event."""
        is_whole = False
        while not is_whole:
            message = self._unsent.popleft()
            is_whole = message.message_finished
            self._size -= len(message.data)
            self.held.give_back(len(message.data))
        self._num_sent += 1

    def check(self, last: int) -> None:
        """Raise ClientError unless all events after the one with this number are kept."""
        newest = self._sequence_number - 1
        if last > newest:
            message = f"last_seq must be at most {newest}, the number of the newest event, got {last}"
            raise ClientError("invalid_value", message, param="last_seq")
        if last + 1 < self._oldest:
            message = f"the oldest event that is kept has the number {self._oldest}: last_seq must be at least one less"
            raise ClientError("events_dropped", f"{message}, got {last}", param="last_seq")

    def continue_after(self, last: int) -> None:
        """Make the events after the one with this number the unsent ones, for a client that has those before.

        `check` and `detach` come before this.
        """
        while self._sent:
            self._unsent.appendleft(self._sent.pop())
        self._size += self._sent_size
        self._sent_size = 0
        self._num_sent = self._oldest
        while self._num_sent <= last:
            message = self._unsent.popleft()
            self._size -= len(message.data)
            self._sent_size += len(message.data)
            self._sent.append(message)
            self._num_sent += message.message_finished
        self._trim()
        self._is_attached = True
        self._changes.notify()


async def send_state_events(engine: Engine, outbox: Outbox) -> None:
    """Send an event for each change of state until the engine is closed, and first for a state other than awake.

    For a client that reads slowly, the oldest unsent states are dropped.
    """
    sent = (AWAKE, engine.power.weight_version)
    with engine.states() as states:
        async for state in states:
            shown = (SHOWN[state.power], state.weight_version)
            if shown == sent:
                continue
            await outbox.room()
            modalities = input_modalities(takes_images=engine.runtime.takes_images)
            outbox.put("engine.state", state=shown[0], weight_version=shown[1], input_modalities=modalities)
            sent = shown
