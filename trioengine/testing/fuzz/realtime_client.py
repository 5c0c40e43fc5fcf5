"""A Realtime client: sends the events of its conversation, over a connection of its session."""

from __future__ import annotations

import json
from typing import Any

from trioengine.serve.config import ServeConfig
from trioengine.serve.connection import LINGER_TIMEOUT
from trioengine.serve.realtime.connection import CLOSE_TIMEOUT, GOING_AWAY, TAKEN_OVER, TRY_AGAIN_LATER
from trioengine.serve.realtime.endpoint import NOT_RESUMED
from trioengine.testing.fuzz.conversations import Content
from trioengine.testing.fuzz.realtime_response import Asked, Owed
from trioengine.testing.fuzz.realtime_session import Session
from trioengine.testing.fuzz.realtime_shapes import ALWAYS_REFUSED, output_item, user_item
from trioengine.testing.fuzz.tools import TOOL_USES
from trioengine.testing.simulated_peer import PeerState, SimulatedClient


class RealtimeClient(SimulatedClient):
    """One connection of a session. Assertions are raised from where its bytes arrive."""

    def __init__(self, session: Session, config: ServeConfig, last: int = -1) -> None:
        """`last` is the number of the last event that the client has, or pretends to have."""
        super().__init__(session.target(last), self._take)
        self.conversation = session.conversation
        self.num_events = last + 1
        self._session = session
        self._config = config
        self._last = last
        self._must_be_refused = session.is_over
        self._began = session.join(self)
        self._deaf_since: float | None = None  # when it came to rest, and read nothing more
        self._is_spoilt = False  # it has sent garbage
        if last >= 0:
            self.mark()

    # ---- events of the client ---------------------------------------------------------------------------------------

    def ask(self, name: str, *, size: int = 0, **fields: Any) -> Owed:
        """Send an event of at least so many bytes, which is answered."""
        owed = self.conversation.owe(name, fields)
        self.send(json.dumps({"type": name, "event_id": owed.id, **fields}).ljust(size))
        return owed

    def ask_wrongly(self, how: str, size: int = 0) -> Owed:
        """Send an event that is refused."""
        name, fields, code, param = ALWAYS_REFUSED[how]
        owed = self.ask(name, size=size, **fields)
        owed.refused = code, param
        if name == "response.create":
            owed.asked = Asked(0)
        return owed

    def mark(self) -> None:
        """Find out which of the events that were sent on other connections have arrived."""
        self.conversation.doubt()
        self.ask_wrongly("odd").is_mark = True

    def say(self, content: Content, *, previous: str | None = None, id: str | None = None) -> None:
        """Add an item of the user's, with this id, at the end or after another item; "root" is the beginning."""
        place: dict[str, Any] = {} if previous is None else {"previous_item_id": previous}
        named = {} if id is None else {"id": id}
        self.ask("conversation.item.create", item=user_item(content) | named, **place).content = content

    def answer_call(self, text: str) -> None:
        """Add the output of a call."""
        owed = self.ask("conversation.item.create", item=output_item(text))
        owed.role, owed.content = "tool", text

    def refer(self) -> None:
        """A response beside the conversation, to its middle item alone."""
        self._create(Asked(20, is_beside=True, reference=self.conversation.middle))

    def respond(self, max_tokens: int, metadata: dict[str, str] | None = None) -> None:
        self._create(Asked(max_tokens, metadata=metadata))

    def respond_beside(self, max_tokens: int, content: Content | None = None, tools: str = "") -> None:
        """From the conversation, or from this alone; maybe with tools of its own."""
        turns = None if content is None else (("user", content),)
        self._create(Asked(max_tokens, is_beside=True, input=turns, tools=tools))

    def _create(self, asked: Asked) -> None:
        response: dict[str, Any] = {"max_output_tokens": asked.max_tokens}
        if self._session.window and not asked.is_beside:
            asked.metadata = {"number": str(self._session.next_number())}
        if asked.metadata is not None:
            response["metadata"] = asked.metadata
        if asked.is_beside:
            response["conversation"] = "none"
        if asked.input is not None:
            response["input"] = [user_item(content) for _, content in asked.input]
        if asked.reference is not None:
            response["input"] = [{"type": "item_reference", "id": asked.reference}]
        if asked.tools:
            response |= TOOL_USES[asked.tools].realtime_fields()
        self.ask("response.create", response=response).asked = asked

    def truncate(self, text_end: int) -> None:
        """Truncate the last answer; before the first one, name an item that does not exist."""
        id = (self.conversation.ids_of("assistant") or ["none"])[-1]
        self.ask("conversation.item.truncate", item_id=id, content_index=0, text_end=text_end)

    def cancel(self, *, by_id: bool = False) -> None:
        """Cancel the conversation's response; it is answered by an error only, where there is nothing to cancel."""
        self._cancel(self.conversation.response if by_id else None)

    def cancel_beside(self) -> bool:
        """Cancel one of them; False if none is active."""
        responses = self.conversation.responses.values()
        response = next((response for response in responses if response.asked.is_beside), None)
        if response is None:
            self.ask_wrongly("no response")
            return False
        self._cancel(response.id)
        return True

    def _cancel(self, response_id: str | None) -> None:
        id = self.conversation.cancel(response_id)
        named = {} if response_id is None else {"response_id": response_id}
        self.send(json.dumps({"type": "response.cancel", "event_id": id, **named}))

    # ---- its connection ---------------------------------------------------------------------------------------------

    @property
    def is_speaker(self) -> bool:
        """Whether its client sends on this connection, and not on another one of its session."""
        return self._session.speaker is self

    @property
    def can_send(self) -> bool:
        return self.is_speaker and super().can_send

    @property
    def can_step_in(self) -> bool:
        """Whether its client could go back to this connection."""
        return self.accepted and super().can_send

    @property
    def has_begun(self) -> bool:
        """Whether an event has come on it."""
        return self.num_events > self._last + 1

    @property
    def is_active(self) -> bool:
        return self.is_speaker and self.conversation.response is not None

    @property
    def is_served(self) -> bool:
        """Whether it is connected, and reads and sends."""
        return self.peer_state is PeerState.WELL and self.accepted and self.can_send

    @property
    def stuck(self) -> list[str]:
        """The responses that it waits for."""
        return list(self.conversation.responses) if self.is_speaker and self.peer_state is PeerState.WELL else []

    def close(self) -> None:
        self._session.may_end()
        super().close()

    def send_garbage(self) -> None:
        self._is_spoilt = True
        self._session.may_end()
        super().send_garbage()

    def on_accepted(self) -> None:
        assert not self._must_be_refused, "it resumes a session that is over"

    def on_refusal(self, status: int, body: bytes) -> None:
        self._session.refused(status, json.loads(body), self._last)
        self._session.step_back(self)

    def on_goodbye(self, code: int, reason: str) -> None:
        if code == NOT_RESUMED:
            self._session.not_resumed(reason, self._last)
            self._session.step_back(self)
        elif code == TAKEN_OVER:
            self._session.check_taken_over(self)
            self._session.step_back(self)
        else:
            self._check_goodbye(code)
            self._session.may_end()

    def on_closed(self, code: int) -> None:
        if code == TAKEN_OVER:  # so that its own close has not ended the session
            self.on_goodbye(code, "")
        else:
            self._session.closed(self)

    def _check_goodbye(self, code: int) -> None:
        is_dropped, responses = self.conversation.is_dropped, self.conversation.responses
        assert code != TRY_AGAIN_LATER or is_dropped, "no message was dropped"
        assert code != GOING_AWAY or not responses, f"a goodbye in the middle of {set(responses)}"
        assert code != GOING_AWAY or self._session.is_closing, "the server goes away, and was not drained"
        expected = (TRY_AGAIN_LATER, GOING_AWAY) if self._session.window else (1000, TRY_AGAIN_LATER, GOING_AWAY)
        assert code in expected or self._is_spoilt, f"a goodbye with the code {code}"

    def _leave(self) -> None:
        super()._leave()
        self._session.step_back(self)

    def _take(self, event: dict[str, Any]) -> None:
        if not self.has_begun and self._last >= 0:
            self._session.resumed()
        self.num_events += 1
        self._session.take(event, self.num_events - 1, self._began)

    # ---- at rest ----------------------------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """All is answered, and all events have come."""
        if self.is_served:
            self.conversation.check_at_rest()
            self._session.check_whole()

    def check_deaf(self, now: float) -> None:
        """At rest: a deaf client is disconnected in time. `now` leaves out the time by which tasks were late."""
        closing = max(self._config.handshake_timeout, CLOSE_TIMEOUT) + LINGER_TIMEOUT
        most = 2 * self._config.client_ping_interval + closing
        if self.peer_state not in (PeerState.STALLED, PeerState.VANISHED) or self.stream.closed:
            self._deaf_since = None
        elif self._deaf_since is None:
            self._deaf_since = now
        else:
            waits = now - self._deaf_since
            assert waits <= most, f"a client has answered no ping for {waits:g} s, and is connected"

    def check_bytes(self, counted: int) -> None:
        """At rest, between responses, the server counts its conversation with instructions and tools alone."""
        is_quiet = self.peer_state is PeerState.WELL and self.can_send and self.conversation.is_quiet
        due = self.conversation.size
        assert not is_quiet or counted == due, f"{counted} bytes are counted, and {due} are in its conversation"

    def check_closed(self) -> None:
        """At rest, and the server is closed: its responses are over, and it has sent a close frame."""
        assert not self.is_served or self.conversation.responses, "the server is closed, and has sent no close frame"
