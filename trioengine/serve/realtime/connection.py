"""A Realtime connection as its client sees it: a session, carried by one WebSocket after another if it can be resumed.

One task each handles events, runs responses, and reports states of the engine; the carrier has tasks of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Power
from trioengine.serve.asked_model import ServedNames
from trioengine.serve.body import DisconnectCounter, log_disconnect
from trioengine.serve.chat_request import ServedModel
from trioengine.serve.config import ConnectionLimits
from trioengine.serve.errors import ClientError, OverBudget, Problem, problem_of
from trioengine.serve.ids import new_id
from trioengine.serve.limits import Held, size_of
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.reading import check_supported
from trioengine.serve.realtime.carrier import CLOSE_TIMEOUT as CLOSE_TIMEOUT
from trioengine.serve.realtime.carrier import NORMAL, Carrier
from trioengine.serve.realtime.events import EventError, Received, keep_images, parse
from trioengine.serve.realtime.inbox import Inbox
from trioengine.serve.realtime.item import Item
from trioengine.serve.realtime.items import Items
from trioengine.serve.realtime.next_response import NextResponse
from trioengine.serve.realtime.outbox import EVENT_FACTOR, Outbox, send_state_events
from trioengine.serve.realtime.prompt import prompt_of
from trioengine.serve.realtime.requests import (
    OUT_OF_BAND,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
)
from trioengine.serve.realtime.response import (
    ConversationResponses,
    OutOfBandResponses,
    Response,
    ResponseRunner,
    ResponseSpec,
)
from trioengine.serve.realtime.settings import Settings
from trioengine.serve.realtime.window import MAX_KEPT, Window
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.serve.websocket import AcceptedWebSocket
from trioengine.text.tool_calls import ToolForm

logger = logging.getLogger("trioengine")
GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR, TRY_AGAIN_LATER = 1001, 1008, 1011, 1013
TAKEN_OVER = 4001
FINAL = (NORMAL, 1005, 1002, 1007, 1009)  # closes after which no client comes back: intended, or for its faults


class RealtimeConnection:
    """A client's session, which `attach` connects to its client.

    `run` returns when the client is gone, and its engine sessions have ended. Once `closing` is set, responses in
    progress are finished and sent, and the WebSocket is closed. With a `window`, a client that was lost may come back.
    """

    def __init__(
        self,
        runner: ResponseRunner,
        model: str,
        closing: trio.Event,
        *,
        limits: ConnectionLimits,
        disconnects: DisconnectCounter,
        held: Held,
        unknown_fields: UnknownFields,
        tool_form: ToolForm | None = None,
        window: Window | None = None,
    ) -> None:
        """`tool_form` is the form of tool calls; None: as the chat template shows it."""
        self.id = new_id("sess_")
        self._conversation_id = new_id("conv_")
        self._engine = runner.engine
        self._model = model
        self._closing = closing
        self._disconnects = disconnects
        self._is_gone = False  # the client
        self._settings = Settings()
        self._tool_form = tool_form
        self._held = held
        self._unknown_fields = unknown_fields
        self._items = Items(limits.max_conversation_size, held)
        self._ping_interval = limits.client_ping_interval
        self._inbox = Inbox(held)
        self._outbox = Outbox(limits.send_timeout, held, 0 if window is None else MAX_KEPT)
        self._in_conversation = ConversationResponses(runner, self.id, on_end=self._begin_next)
        self._next: NextResponse | None = None
        self._out_of_band = OutOfBandResponses(runner, self.id)
        self._work = trio.CancelScope()
        self._carrier: Carrier | None = None
        self._window = window
        self._close_code, self._close_reason = NORMAL, ""
        shown = {} if window is None else {"resume": window.to_json()}
        self._outbox.put("session.created", session=self._shown_settings, **shown)

    async def run(self) -> None:
        try:
            with self._work:
                await self._run()
        except Exception:
            self._close_code, self._close_reason = INTERNAL_ERROR, "internal error"
            raise
        finally:
            self._work.cancel()
            self._drop_next()
            self._items.close()
            self._inbox.source = None
            if self._carrier is not None:
                self._carrier.close(self._close_code, self._close_reason)

    async def _run(self) -> None:
        async with trio.open_nursery() as work:
            self._out_of_band.run_in(work)
            work.start_soon(self._handle)
            work.start_soon(self._in_conversation.run)
            work.start_soon(send_state_events, self._engine, self._outbox)
            if self._window is not None:
                work.start_soon(self._end_after, self._window)
            await self._wait_to_close()
            self._work.cancel()

    async def _wait_to_close(self) -> None:
        """Wait until the server is closing, all responses are over, and all events are sent."""
        await self._closing.wait()
        await self._outbox.flushed()
        while self._active:
            await self._in_conversation.idle()
            await self._out_of_band.idle()
            await self._outbox.flushed()  # a response.create is refused meanwhile, by an event
        self._close_code, self._close_reason = GOING_AWAY, "the server is shutting down"

    @property
    def _active(self) -> tuple[Response, ...]:
        return *self._in_conversation.active, *self._out_of_band.active

    # ---- the client -----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether it ends, so that no client can come back."""
        return self._work.cancel_called

    def check_last(self, last: int) -> None:
        """Raise ClientError unless all events after the one with this number can be sent."""
        self._outbox.check(last)

    def check_models(self, names: Iterable[str]) -> None:
        """Raise ClientError for another model than the session's."""
        for name in names:
            ServedNames(self._model, {}).asked(name)

    def attach(self, websocket: AcceptedWebSocket, last: int = -1) -> Carrier:
        """Return the carrier of this WebSocket, for the caller to run: it sends the events after this number.

        A WebSocket before it is closed. Raises ClientError as `check_last`, and then changes nothing.
        """
        self._outbox.check(last)
        if self._carrier is not None:
            self._carrier.close(TAKEN_OVER, "another connection has resumed the session")
        self._outbox.detach()
        if self._window is not None:
            self._window.close()
        self._carrier = Carrier(self, websocket, self._inbox, self._outbox, self._ping_interval)
        self._inbox.source = websocket
        self._outbox.continue_after(last)
        return self._carrier

    def lose(self, carrier: Carrier, code: int | None = None) -> None:
        """End, or wait for the client, after its WebSocket was closed with this code, or is silent (None)."""
        if carrier is not self._carrier or self.is_over:
            return
        if code is not None:
            log_disconnect("it closed the connection")
        if self._window is None or code in FINAL or self._engine.state in (Power.DRAINING, Power.CLOSED):
            self._end()
        else:
            self._carrier = self._inbox.source = None
            self._outbox.detach()
            self._window.open()

    def cut_window(self) -> None:
        """End it soon if its client was lost."""
        if self._window is not None:
            self._window.cut()

    async def _end_after(self, window: Window) -> None:
        """End once the client has not come back in time."""
        await window.passed(self._outbox)
        log_disconnect("it has not resumed its session")
        self._end()

    def stop_sending(self) -> None:
        """Send nothing more: a write in progress changes nothing when it ends."""
        self._outbox.detach()

    async def closed(self) -> None:
        """Wait, after the end, until its last events and the close are sent."""
        if self._carrier is not None:
            await self._carrier.closed.wait()

    def flood(self, carrier: Carrier, reason: str) -> None:
        """Disconnect a client that sends more than is handled."""
        if carrier is self._carrier:
            self._disconnect(POLICY_VIOLATION, reason)

    def _disconnect(self, code: int, reason: str) -> None:
        """Disconnect the client with this code and reason, once the work is cancelled."""
        log_disconnect(reason)
        self._close_code, self._close_reason = code, reason
        self._end()

    def _end(self) -> None:
        """End the responses of a client that is gone or has to go; count it once if a response was in progress."""
        if not self._is_gone and self._active:
            self._disconnects.count += 1
        self._is_gone = True
        self._drop_next()
        for response in self._active:  # before they are cancelled, so that the disconnect is the cause
            response.abandon()
        self._work.cancel()

    # ---- events ---------------------------------------------------------------------------------------------------

    async def _handle(self) -> None:
        while await self._handle_next():
            pass

    async def _handle_next(self) -> bool:
        """Handle a message, which is dropped once parsed; False if the connection has to be closed."""
        message = await self._inbox.next()
        await self._outbox.room()
        if isinstance(message, OverBudget):
            await self._give_up(message.problem)
            return False
        size = size_of(message)
        self._inbox.remove(size)
        try:
            received = await self._parse(message)
            del message
            await self._handle_event(received)
        except EventError as exc:
            self._outbox.put_error(exc.problem, exc.event_id)
        finally:
            self._held.give_back(size)
        return True

    async def _give_up(self, problem: Problem) -> None:
        """Close the connection after a message was not kept, as the conversation differs from the client's view."""
        self._outbox.put_error(problem, None)
        await self._outbox.flushed()
        self._disconnect(TRY_AGAIN_LATER, f"no room for a message: {problem.code}")

    async def _handle_event(self, received: Received) -> None:
        with self._report_errors(received):
            with await keep_images(self._engine, received, self._model):
                if not self.is_over:  # otherwise a response would outlive the close
                    self._act(received)

    @contextmanager
    def _report_errors(self, received: Received) -> Iterator[None]:
        """Answer the event by an `error` event if the block raises an exception."""
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, (ClientError, EngineError)):
                logger.exception("%s: a %s crashed", self.id, type(received.event).__name__)
            self._outbox.put_error(problem_of(exc), received.event.event_id)

    async def _parse(self, message: str | bytes) -> Received:
        return await in_thread_if(len(message) > LONG_JSON, self._engine.ports, partial(parse, message))

    def _act(self, received: Received) -> None:
        for unknown in received.unknown:
            self._unknown_fields.report(unknown.names, unknown.known, unknown.prefix)
        match received.event:
            case SessionUpdate(session=session):
                check_supported({"model": session.model}, {"model": (self._model,)}, "session")
                self._update(self._settings.changed(received.changes, "session"))
                self._outbox.put("session.updated", session=self._shown_settings)
            case ItemCreate(previous_item_id=previous):
                self._add(received.item, previous)
            case ItemRetrieve(item_id=item_id):
                item = self._items.get(item_id, "item_id")
                self._held.check_room(EVENT_FACTOR * item.size)
                self._outbox.put("conversation.item.retrieved", item=item.to_json())
            case ItemTruncate() as event:
                self._truncate(event)
            case ItemDelete(item_id=item_id):
                self._outbox.put("conversation.item.deleted", item_id=self._items.delete(item_id))
            case ResponseCreate():
                self._respond(received)
            case ResponseCancel(response_id=response_id):
                self._cancel(response_id)

    @property
    def _shown_settings(self) -> dict[str, Any]:
        return self._settings.to_json(self.id, self._model, takes_images=self._engine.runtime.takes_images)

    def _add(self, item: Item, previous: str | None) -> None:
        before = self._items.add(item, previous)
        for name in ("conversation.item.added", "conversation.item.done"):
            self._outbox.put(name, previous_item_id=before, item=item.to_json())

    def _update(self, settings: Settings) -> None:
        """Raise OverBudget for instructions and tools that, with the event that repeats them, exceed the budget."""
        size, old_size = settings.size, self._settings.size
        if size:
            self._held.check_room(max(0, size - old_size) + EVENT_FACTOR * size)
        self._held.charge(size - old_size)
        self._settings = settings

    def _truncate(self, event: ItemTruncate) -> None:
        item = self._items.truncate(event.item_id, event.content_index, event.text_end)
        place = {"item_id": item.id, "content_index": event.content_index}
        self._outbox.put("conversation.item.truncated", **place, text_end=event.text_end, audio_end_ms=0)

    # ---- responses ------------------------------------------------------------------------------------------------

    def _respond(self, received: Received) -> None:
        """Begin a response; if the active one is cancelled, remember the event until that has ended."""
        is_out_of_band = received.response.conversation == OUT_OF_BAND
        if is_out_of_band or self._next is not None or not self._in_conversation.is_cancelled:
            self._begin(received)
            return
        self._settings.changed(received.changes, "response")  # refuses wrong ones at once
        self._next = NextResponse(received, self._held)

    def _begin(self, received: Received) -> Response:
        is_out_of_band = received.response.conversation == OUT_OF_BAND
        runner = self._out_of_band if is_out_of_band else self._in_conversation
        runner.check_room()
        if not is_out_of_band:
            self._items.check_room(1, None)
        spec = self._spec(received)
        if is_out_of_band:
            response = Response(spec, self._outbox, conversation_id=None, items=None)
        else:
            response = Response(spec, self._outbox, self._conversation_id, self._items)
        runner.begin(response)
        return response

    def _spec(self, received: Received) -> ResponseSpec:
        """Return the request of a response to the present conversation, or to its own input. Raises ClientError."""
        given, settings = received.response, self._settings.changed(received.changes, "response")
        is_lasting = given.input is None and settings.truncation.is_lasting
        left_out = self._items.left_out if is_lasting else ()
        items = self._items if given.input is None else self._items.resolve(received.items)
        left_out_ids = {item.id for item in left_out}
        items = [item for item in items if item.id not in left_out_ids]
        model = ServedModel.of(self._engine, self._model, self._tool_form, None)
        tools = settings.chosen_tools(model.tool_form)
        prompt = prompt_of(items, settings.instructions, tools, model)
        if not prompt.messages:
            raise ClientError("empty_conversation", "there is nothing to respond to: create an item first")
        spec = ResponseSpec(
            prompt,
            settings.params("response", None if tools is None else tools.grammar),
            settings.truncation,
            settings.max_output_tokens,
            given.metadata,
            received.event.event_id,
            left_out,
            is_lasting,
            None if tools is None else tools.form,
        )
        self._held.check_room(spec.size)
        return spec

    def _begin_next(self) -> None:
        """Handle the response.create that was remembered, if any, as the response before it has ended."""
        following = self._next
        if following is None:
            return
        with self._report_errors(following.received):
            following.give_back()
            response = self._begin(following.received)
            if following.is_cancelled:
                response.cancel()
        self._drop_next()

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.release()
        self._next = None

    def _cancel(self, response_id: str | None) -> None:
        """Cancel a response: by default the conversation's, and if that was cancelled, the remembered one."""
        response = self._response(response_id)
        if response_id is None and response.cancelled and self._next is not None:
            self._next.is_cancelled = True
        else:
            response.cancel()

    def _response(self, response_id: str | None) -> Response:
        """Return an active response by id, or the conversation's for None. Raises ClientError."""
        active = self._in_conversation.active if response_id is None else self._active
        response = next((response for response in active if response_id in (None, response.id)), None)
        if response is None:
            problem = (
                "the conversation has no active response" if response_id is None else "no active response has this id"
            )
            raise ClientError("response_cancel_not_active", problem, param="response_id")
        return response
