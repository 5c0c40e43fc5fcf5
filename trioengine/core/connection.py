"""The protocol between the engine and one worker incarnation: which message may be sent when.

One class drives both ends, in h11's manner: `send(message) -> bytes`, `receive_data(bytes)`, `next_message()`. It does
no I/O. Both ends apply the same rules to the messages they send and receive, so both know the same state. A message of
ours that breaks a rule raises LocalProtocolError and changes nothing; a message of the peer's raises
RemoteProtocolError, and the connection cannot be used any more.

An incarnation passes through stages: NEW, CONFIGURED, READY, and FAILED after FATAL. For each session, while READY:

    engine to worker: ADD_SESSION (ADD_MESSAGE STOP_SESSION?)* END_SESSION
    worker to engine: TOKENS with rows of the request in flight, which ends with its last row or with REQUEST_FAILED;
                      SESSION_ENDED after END_SESSION, once, last

Messages cross on the way: a STOP_SESSION may meet a request that has finished, and rows may meet an END_SESSION; both
are legal. A message of the engine's may also cross FATAL, after which the worker sends nothing.

The payloads that an ADD_MESSAGE announces travel beside the frames; PAYLOAD_CONSUMED follows once for each, before or
after the end of its request or session.

SLEEP, WAKE and UPDATE_WEIGHTS (control requests) are sent one at a time, while no session exists; each has a reply.
Until the reply, and while any tag sleeps, no session is added.

PING and PONG, AUDIT and AUDITED are pairs: one PING at a time; AUDITs are answered in their order.

`RULES`, at the end, is the whole protocol as a table: a row for each message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trioengine.core.codec import FrameBuffer, decode, encode, frame
from trioengine.core.errors import FrameTooLarge, LocalProtocolError, ProtocolError, RemoteProtocolError
from trioengine.core.messages import (
    WIRE_NAMES,
    AddMessage,
    AddSession,
    Audit,
    Audited,
    Configure,
    ControlReply,
    ControlRequest,
    EndSession,
    Fatal,
    Loading,
    Message,
    PayloadConsumed,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Shutdown,
    Sleep,
    Slept,
    StopSession,
    Tokens,
    Updated,
    UpdateWeights,
    Wake,
    Woken,
)
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.types import FinishReason, TableEnum, token_ids

MIN_FRAME_LIMIT = 1 << 20  # bytes: room for everything in a message but its token ids
BYTES_PER_TOKEN = 16  # of the context: each may be a token id, and the first one of an image's tile


class Role(TableEnum):
    """One end of the connection."""

    ENGINE = "engine"
    WORKER = "worker"


class Stage(TableEnum):
    """A stage of an incarnation."""

    NEW = "new"
    CONFIGURED = "configured"
    READY = "ready"
    FAILED = "failed"  # FATAL was sent


class _Violation(Exception):
    """A message breaks a rule; the text follows the message's name in the error."""


@dataclass(slots=True)
class _Attachment:
    """One session, from ADD_SESSION to SESSION_ENDED."""

    ending: bool = False
    latest_request: int = 0  # 0: none yet
    in_flight: bool = False


class Connection:
    """One end of the pipe between the engine and one worker incarnation. Not thread-safe: guard it with one lock."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.stage = Stage.NEW
        self.max_frame_bytes = MIN_FRAME_LIMIT
        self._peer = Role.WORKER if role is Role.ENGINE else Role.ENGINE
        self._vocab_size = 0  # from READY
        self._attachments: dict[int, _Attachment] = {}
        self._payloads: set[int] = set()  # announced, and not consumed
        self._latest_payload = 0
        self._asleep: frozenset[Tag] = frozenset()
        self._control: ControlRequest | None = None  # without a reply yet
        self._audits: deque[int] = deque()  # not answered yet
        self._ping: int | None = None  # not answered yet
        self._frames = FrameBuffer()
        self._broken: RemoteProtocolError | None = None

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions that were added and whose SESSION_ENDED has not been sent."""
        return frozenset(self._attachments)

    @property
    def open_sessions(self) -> frozenset[int]:
        """The sessions that were added and whose END_SESSION has not been sent."""
        return frozenset(session for session, attachment in self._attachments.items() if not attachment.ending)

    @property
    def payloads(self) -> frozenset[int]:
        """The payloads that were announced and whose PAYLOAD_CONSUMED has not been sent."""
        return frozenset(self._payloads)

    @property
    def has_partial_frame(self) -> bool:
        """Whether bytes of an incomplete frame are left: at the end of the stream, a torn frame."""
        return bool(self._frames)

    def send(self, message: Message) -> bytes:
        """Return the frame to write.

        Raises LocalProtocolError for a message that is not legal now, FrameTooLarge for one that does not fit a frame;
        nothing is changed then.
        """
        payload = encode(message)
        if len(payload) > self.max_frame_bytes:
            name = WIRE_NAMES[type(message)]
            raise FrameTooLarge(f"{name} takes {len(payload)} bytes; a frame holds at most {self.max_frame_bytes}")
        self._apply(message, self.role, LocalProtocolError)
        return frame(payload)

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes that came from the pipe, in portions of any size."""
        self._frames += data

    def next_message(self) -> Message | None:
        """Return the next whole message, or None when more bytes are needed.

        Raises RemoteProtocolError for bytes that are not a legal message; every later call raises it again.
        """
        if self._broken is not None:
            raise self._broken
        try:
            payload = self._frames.next_payload(self.max_frame_bytes)
            if payload is None:
                return None
            message = decode(payload)
            self._apply(message, self._peer, RemoteProtocolError)
        except RemoteProtocolError as exc:
            self._broken = exc
            raise
        return message

    def _apply(self, message: Message, sender: Role, blame: type[ProtocolError]) -> None:
        """Take over the change of state that the message makes; raise `blame`, and change nothing, if it is illegal."""
        rule = RULES[type(message)]
        try:
            if rule.sender is not sender:
                raise _Violation(f"is not sent by the {sender.value}")
            if self.stage not in rule.stages:
                raise _Violation(f"while the connection is {self.stage.value}")
            rule.apply(self, message)
        except _Violation as exc:
            raise blame(f"{WIRE_NAMES[type(message)]} {exc}") from None

    # ---- rules: each raises _Violation, or changes the state -----------------------------------------------------

    def _unchanged(self, message: Message) -> None:
        """The stage is the only condition."""

    def _configure(self, message: Configure) -> None:
        self.stage = Stage.CONFIGURED
        self._asleep = frozenset(message.config.asleep)

    def _ready(self, message: Ready) -> None:
        self.stage = Stage.READY
        self.max_frame_bytes = MIN_FRAME_LIMIT + BYTES_PER_TOKEN * message.max_model_len
        self._vocab_size = message.vocab_size

    def _fatal(self, message: Fatal) -> None:
        self.stage = Stage.FAILED

    def _add_session(self, message: AddSession) -> None:
        if self._control is not None:
            raise _Violation(f"while {WIRE_NAMES[type(self._control)]} is unanswered")
        if self._asleep:
            raise _Violation("while the worker sleeps")
        if message.session in self._attachments:
            raise _Violation(f"for session {message.session}, which exists already")
        self._attachments[message.session] = _Attachment()

    def _add_message(self, message: AddMessage) -> None:
        attachment = self._open(message.session)
        if attachment.in_flight:
            raise _Violation(f"while request {attachment.latest_request} of session {message.session} is in flight")
        if message.request <= attachment.latest_request:
            raise _Violation(f"with request {message.request}, which is not newer than {attachment.latest_request}")
        payloads = [image.payload for image in message.images]
        if [self._latest_payload, *payloads] != sorted({self._latest_payload, *payloads}):
            raise _Violation(f"with payloads {payloads}, which do not ascend from {self._latest_payload}")
        attachment.latest_request = message.request
        attachment.in_flight = True
        self._payloads.update(payloads)
        self._latest_payload = payloads[-1] if payloads else self._latest_payload

    def _stop_session(self, message: StopSession) -> None:
        attachment = self._open(message.session)
        if message.request != attachment.latest_request:
            raise _Violation(f"for request {message.request}, which is not the session's {attachment.latest_request}")

    def _end_session(self, message: EndSession) -> None:
        self._open(message.session).ending = True

    def _tokens(self, message: Tokens) -> None:
        finished, generated = [], token_ids()
        for row in message.rows:
            attachment = self._in_flight(row.session, row.request)
            generated.extend(row.token_ids)
            if row.finish_reason is None:
                if not row.token_ids and not row.prompt_logprobs:
                    raise _Violation("with a row that has no token and is not the last one")
                if row.embedding is not None:
                    raise _Violation("with an embedding in a row that is not the last one")
                continue
            if row.finish_reason is FinishReason.ERROR:
                raise _Violation("with a row that ends in an error, which REQUEST_FAILED reports")
            if row.finish_reason is FinishReason.TOOL_CALLS:
                raise _Violation("with a row that ends in tool calls, which the engine finds in the answer")
            if row.usage is None:
                raise _Violation("with a last row that has no usage")
            finished.append(attachment)
        if generated and not 0 <= min(generated) <= max(generated) < self._vocab_size:
            raise _Violation(f"with a token outside the vocabulary of {self._vocab_size}")
        if len({row.session for row in message.rows}) < len(message.rows):
            raise _Violation("with two rows of one session")
        for attachment in finished:
            attachment.in_flight = False

    def _request_failed(self, message: RequestFailed) -> None:
        self._in_flight(message.session, message.request).in_flight = False

    def _session_ended(self, message: SessionEnded) -> None:
        attachment = self._attachments.get(message.session)
        if attachment is None or not attachment.ending:
            raise _Violation(f"for session {message.session}, which is not ending")
        del self._attachments[message.session]

    def _payload_consumed(self, message: PayloadConsumed) -> None:
        if message.payload not in self._payloads:
            raise _Violation(f"for payload {message.payload}, which was not announced or is consumed already")
        self._payloads.remove(message.payload)

    def _request_control(self, message: ControlRequest) -> None:
        if self._attachments:
            raise _Violation(f"while sessions exist ({len(self._attachments)})")
        if self._control is not None:
            raise _Violation(f"while {WIRE_NAMES[type(self._control)]} is unanswered")
        if isinstance(message, Wake) and not (message.tags and self._asleep.issuperset(message.tags)):
            raise _Violation("for tags that are awake")
        self._control = message

    def _reply_to_control(self, message: ControlReply) -> None:
        expected = _REPLIES[type(message)]
        if type(self._control) is not expected:
            raise _Violation(f"without {WIRE_NAMES[expected]} to answer")
        match self._control, message:
            case Sleep(), _:
                self._asleep = ALL_TAGS
            case Wake(tags), Woken(None):
                self._asleep -= frozenset(tags)
        self._control = None

    def _audit(self, message: Audit) -> None:
        self._audits.append(message.audit)

    def _audited(self, message: Audited) -> None:
        if not self._audits or self._audits[0] != message.audit:
            raise _Violation(f"{message.audit}, which does not answer the oldest AUDIT")
        self._audits.popleft()

    def _send_ping(self, message: Ping) -> None:
        if self._ping is not None:
            raise _Violation("while another one is unanswered")
        self._ping = message.ping

    def _pong(self, message: Pong) -> None:
        if self._ping != message.ping:
            raise _Violation(f"{message.ping}, which answers no PING")
        self._ping = None

    def _open(self, session: int) -> _Attachment:
        attachment = self._attachments.get(session)
        if attachment is None or attachment.ending:
            raise _Violation(f"for session {session}, which {'is ending' if attachment else 'does not exist'}")
        return attachment

    def _in_flight(self, session: int, request: int) -> _Attachment:
        attachment = self._attachments.get(session)
        if attachment is None or not attachment.in_flight or attachment.latest_request != request:
            raise _Violation(f"for request {request} of session {session}, which is not in flight")
        return attachment


class Rule(NamedTuple):
    """A row of the protocol: the sender, the stages in which the message may be sent, and the change it makes."""

    sender: Role
    stages: frozenset[Stage]
    apply: Callable[[Connection, Any], None]


_REPLIES: dict[type[ControlReply], type[ControlRequest]] = {Slept: Sleep, Woken: Wake, Updated: UpdateWeights}
_NEW, _CONFIGURED, _READY = frozenset({Stage.NEW}), frozenset({Stage.CONFIGURED}), frozenset({Stage.READY})
_ALIVE = _NEW | _CONFIGURED | _READY
_CROSSING = frozenset({Stage.FAILED})  # the engine's message may cross FATAL on the way
_SERVING = _READY | _CROSSING
RULES: dict[type[Message], Rule] = {
    Configure: Rule(Role.ENGINE, _NEW, Connection._configure),
    AddSession: Rule(Role.ENGINE, _SERVING, Connection._add_session),
    AddMessage: Rule(Role.ENGINE, _SERVING, Connection._add_message),
    StopSession: Rule(Role.ENGINE, _SERVING, Connection._stop_session),
    EndSession: Rule(Role.ENGINE, _SERVING, Connection._end_session),
    Audit: Rule(Role.ENGINE, _SERVING, Connection._audit),
    Ping: Rule(Role.ENGINE, _ALIVE | _CROSSING, Connection._send_ping),
    Sleep: Rule(Role.ENGINE, _SERVING, Connection._request_control),
    Wake: Rule(Role.ENGINE, _SERVING, Connection._request_control),
    UpdateWeights: Rule(Role.ENGINE, _SERVING, Connection._request_control),
    Shutdown: Rule(Role.ENGINE, _ALIVE | _CROSSING, Connection._unchanged),
    Loading: Rule(Role.WORKER, _CONFIGURED, Connection._unchanged),
    Ready: Rule(Role.WORKER, _CONFIGURED, Connection._ready),
    Tokens: Rule(Role.WORKER, _READY, Connection._tokens),
    RequestFailed: Rule(Role.WORKER, _READY, Connection._request_failed),
    SessionEnded: Rule(Role.WORKER, _READY, Connection._session_ended),
    PayloadConsumed: Rule(Role.WORKER, _READY, Connection._payload_consumed),
    Audited: Rule(Role.WORKER, _READY, Connection._audited),
    Pong: Rule(Role.WORKER, _ALIVE, Connection._pong),
    Slept: Rule(Role.WORKER, _READY, Connection._reply_to_control),
    Woken: Rule(Role.WORKER, _READY, Connection._reply_to_control),
    Updated: Rule(Role.WORKER, _READY, Connection._reply_to_control),
    Fatal: Rule(Role.WORKER, _ALIVE, Connection._fatal),
}
