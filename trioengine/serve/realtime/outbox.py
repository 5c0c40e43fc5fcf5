"""The events to a client: a queue with back-pressure, and events about the state of the engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import trio
from trio_websocket import ConnectionClosed
from wsproto.events import TextMessage

from trioengine.actors.engine import Engine
from trioengine.aio.concurrency import Notifier
from trioengine.core.lifecycle import Power
from trioengine.serve.errors import Problem
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

    A client that reads nothing for `send_timeout` seconds is disconnected. `held` accounts for the bytes.
    """

    def __init__(self, send_timeout: float, held: Held) -> None:
        self.held = held
        self._send_timeout = send_timeout
        self._event_id = new_id("event_")  # a prefix of event ids
        self._unsent: deque[TextMessage] = deque()  # long ones in parts
        self._size = 0  # characters, which are ASCII, of these and of the events being sent
        self._sequence_number = 0
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
        self._count(len(text))
        self._changes.notify()

    def _count(self, size: int) -> None:
        self._size += size
        self.held.charge(size)

    def put_error(self, problem: Problem, event_id: str | None) -> None:
        """Queue an error event; `event_id` names the client's event that caused it."""
        self.put("error", error={**problem.to_json(), "event_id": event_id})

    async def room(self) -> None:
        """Wait until the client has read enough for more."""
        await trio.lowlevel.checkpoint()
        while self._size > ROOM:
            await self._changes.wait()

    async def flushed(self) -> None:
        """Wait until all events are sent."""
        while self._size:
            await self._changes.wait()

    async def send_to(self, websocket: AcceptedWebSocket) -> None:
        """Send until cancelled, or until the WebSocket is closed. Raises TooSlowError when the client does not read."""
        while True:
            while not self._unsent:
                await self._changes.wait()
            messages = self._next()
            try:
                with trio.fail_after(self._send_timeout):
                    await websocket.send(messages)
            except ConnectionClosed:
                return
            self._count(-sum(len(message.data) for message in messages))
            self._changes.notify()

    def _next(self) -> list[TextMessage]:
        """Dequeue the events of one write: the first, and more if they are small."""
        messages = [self._unsent.popleft()]
        size = len(messages[0].data)
        while self._unsent and (size := size + len(self._unsent[0].data)) <= AT_ONCE:
            messages.append(self._unsent.popleft())
        return messages


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
