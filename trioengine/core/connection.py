"""The protocol between the engine and one worker incarnation: frames, and the order of messages.

One class drives both ends, in h11's manner: `send(message) -> bytes`, `receive_data(bytes)`, `next_message()`. It does
no I/O. What we may not send is LocalProtocolError and changes nothing; what the peer may not send is
RemoteProtocolError and makes the connection useless.

The order, per attachment: `ADD_SESSION (ADD_MESSAGE STOP_SESSION?)* END_SESSION` downwards; upwards rows of the request
in flight, its last one or REQUEST_FAILED ending it, and SESSION_ENDED after END_SESSION, once, last. Both ends apply
the same rules to what they send and what they receive. Messages cross: a STOP may meet a request that has finished,
and rows may meet an END; both are legal.

The payloads that an ADD_MESSAGE announces travel beside the frames; PAYLOAD_CONSUMED is said once for each, before or
after its request's end, or its session's.

SLEEP, WAKE and UPDATE_WEIGHTS are said while there is no attachment, in the order of `PowerOrder`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from trioengine.core.codec import LENGTH, FrameBuffer, decode, encode
from trioengine.core.errors import FrameTooLarge, LocalProtocolError, ProtocolError, RemoteProtocolError
from trioengine.core.messages import (
    DOWNWARDS,
    WIRE_NAMES,
    AddMessage,
    AddSession,
    Audit,
    Audited,
    Configure,
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
from trioengine.core.types import FinishReason

MIN_FRAME_LIMIT = 1 << 20


class Role(enum.Enum):
    """Which end of the connection this is."""

    ENGINE = "engine"
    WORKER = "worker"


@dataclass(slots=True)
class _Attachment:
    """What both ends know of one session of the worker."""

    ending: bool = False
    latest_request: int = 0  # the last one that was added; 0: none yet
    in_flight: bool = False


class Connection:
    """One end of the pipe to, or in, one worker incarnation. Not safe for threads: guard it with one lock."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.stage = Stage.NEW
        self.max_frame_bytes = MIN_FRAME_LIMIT
        self._vocab_size = 0  # said in READY
        self._attachments: dict[int, _Attachment] = {}
        self._payloads: set[int] = set()  # announced, and not consumed
        self._latest_payload = 0
        self._audits: deque[int] = deque()
        self._ping: int | None = None
        self._power = PowerOrder()
        self._frames = FrameBuffer()
        self._broken: RemoteProtocolError | None = None

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions that were added and of which SESSION_ENDED has not been said."""
        return frozenset(self._attachments)

    @property
    def open_sessions(self) -> frozenset[int]:
        """Those of them that were not told to end."""
        return frozenset(session for session, attachment in self._attachments.items() if not attachment.ending)

    @property
    def payloads(self) -> frozenset[int]:
        """The payloads that messages announced and of which PAYLOAD_CONSUMED has not been said."""
        return frozenset(self._payloads)

    def send(self, message: Message, payload: bytes | None = None) -> bytes:
        """The frame to write. Raises LocalProtocolError, or FrameTooLarge, and changes nothing then.

        `payload` is what `encode` gave for the message, where that had to be known before.
        """
        if (type(message) in DOWNWARDS) is not (self.role is Role.ENGINE):
            raise LocalProtocolError(f"the {self.role.value} does not send {WIRE_NAMES[type(message)]}")
        apply = self._check(message, LocalProtocolError)
        payload = self.encode(message) if payload is None else payload
        apply()
        return LENGTH.pack(len(payload)) + payload

    def encode(self, message: Message) -> bytes:
        """The message's payload; FrameTooLarge if it does not fit a frame. Nothing is sent."""
        payload = encode(message)
        if len(payload) > self.max_frame_bytes:
            name = WIRE_NAMES[type(message)]
            raise FrameTooLarge(f"{name} takes {len(payload)} bytes, a frame at most {self.max_frame_bytes}")
        return payload

    def receive_data(self, data: bytes | bytearray) -> None:
        """Take bytes as they came from the pipe, in any portions."""
        self._frames.add(data)

    def next_message(self) -> Message | None:
        """The next whole message, or None when more bytes are needed. Raises RemoteProtocolError, then always."""
        if self._broken is not None:
            raise self._broken
        try:
            return self._next_message()
        except RemoteProtocolError as exc:
            self._broken = exc
            raise

    @property
    def has_partial_frame(self) -> bool:
        """Whether bytes are left that are no whole message: at the end of the stream, a torn frame."""
        return bool(self._frames)

    def _next_message(self) -> Message | None:
        payload = self._frames.next_payload(self.max_frame_bytes)
        if payload is None:
            return None
        message = decode(payload)
        if (type(message) in DOWNWARDS) is (self.role is Role.ENGINE):
            raise RemoteProtocolError(f"{WIRE_NAMES[type(message)]} came the wrong way")
        self._check(message, RemoteProtocolError)()
        return message

    # ---- the order: each check raises `blame` or returns the change to make ---------------------------------------

    def _check(self, message: Any, blame: type[ProtocolError]) -> Callable[[], None]:
        name = WIRE_NAMES[type(message)]
        if self.stage not in STAGES[type(message)]:
            raise blame(f"{name} while the connection is {self.stage.value}")
        check = _CHECKS.get(type(message))
        return _no_change if check is None else check(self, message, blame)

    def _check_configure(self, message: Configure, blame: type[ProtocolError]) -> Callable[[], None]:
        def apply() -> None:
            self.stage = Stage.CONFIGURED
            self._power = PowerOrder(message.config.asleep)

        return apply

    def _check_ready(self, message: Ready, blame: type[ProtocolError]) -> Callable[[], None]:
        def apply() -> None:
            self.stage = Stage.READY
            self.max_frame_bytes = max(MIN_FRAME_LIMIT, 8 * message.max_model_len)
            self._vocab_size = message.vocab_size

        return apply

    def _check_fatal(self, message: Fatal, blame: type[ProtocolError]) -> Callable[[], None]:
        return lambda: setattr(self, "stage", Stage.FAILED)

    def _check_add_session(self, message: AddSession, blame: type[ProtocolError]) -> Callable[[], None]:
        self._power.check_session(blame)
        if message.session in self._attachments:
            raise blame(f"ADD_SESSION: session {message.session} is there already")
        return lambda: self._attachments.__setitem__(message.session, _Attachment())

    def _check_add_message(self, message: AddMessage, blame: type[ProtocolError]) -> Callable[[], None]:
        attachment = self._open(message.session, "ADD_MESSAGE", blame)
        if attachment.in_flight:
            raise blame(f"ADD_MESSAGE: session {message.session} has request {attachment.latest_request} in flight")
        if message.request <= attachment.latest_request:
            raise blame(f"ADD_MESSAGE: request {message.request} is not newer than {attachment.latest_request}")
        payloads = [image.payload for image in message.images]
        if any(later <= earlier for earlier, later in pairwise([self._latest_payload, *payloads])):
            raise blame(f"ADD_MESSAGE: payloads {payloads} do not ascend from {self._latest_payload}")

        def apply() -> None:
            attachment.latest_request = message.request
            attachment.in_flight = True
            self._payloads.update(payloads)
            self._latest_payload = payloads[-1] if payloads else self._latest_payload

        return apply

    def _check_stop_session(self, message: StopSession, blame: type[ProtocolError]) -> Callable[[], None]:
        attachment = self._open(message.session, "STOP_SESSION", blame)
        if message.request != attachment.latest_request:
            raise blame(f"STOP_SESSION: request {message.request} is not the session's {attachment.latest_request}")
        return _no_change

    def _check_end_session(self, message: EndSession, blame: type[ProtocolError]) -> Callable[[], None]:
        attachment = self._open(message.session, "END_SESSION", blame)
        return lambda: setattr(attachment, "ending", True)

    def _check_tokens(self, message: Tokens, blame: type[ProtocolError]) -> Callable[[], None]:
        finished = []
        seen = set()
        for row in message.rows:
            attachment = self._in_flight(row.session, row.request, "TOKENS", blame)
            if row.session in seen:
                raise blame(f"TOKENS: two rows of session {row.session}")
            seen.add(row.session)
            if row.finish_reason is FinishReason.ERROR:
                raise blame("TOKENS: a row ends in an error, which is REQUEST_FAILED's to say")
            if row.token_ids and not 0 <= min(row.token_ids) <= max(row.token_ids) < self._vocab_size:
                raise blame(f"TOKENS: a token beyond the vocabulary of {self._vocab_size}")
            if not row.token_ids and row.finish_reason is None:
                raise blame("TOKENS: a row has no token, and is not the last one")
            if row.finish_reason is not None and row.usage is None:
                raise blame("TOKENS: a last row has no usage")
            if row.finish_reason is not None:
                finished.append(attachment)

        def apply() -> None:
            for attachment in finished:
                attachment.in_flight = False

        return apply

    def _check_request_failed(self, message: RequestFailed, blame: type[ProtocolError]) -> Callable[[], None]:
        attachment = self._in_flight(message.session, message.request, "REQUEST_FAILED", blame)
        return lambda: setattr(attachment, "in_flight", False)

    def _check_session_ended(self, message: SessionEnded, blame: type[ProtocolError]) -> Callable[[], None]:
        attachment = self._attachments.get(message.session)
        if attachment is None or not attachment.ending:
            raise blame(f"SESSION_ENDED: session {message.session} was not told to end")
        return lambda: self._attachments.__delitem__(message.session)

    def _check_payload_consumed(self, message: PayloadConsumed, blame: type[ProtocolError]) -> Callable[[], None]:
        if message.payload not in self._payloads:
            raise blame(f"PAYLOAD_CONSUMED: payload {message.payload} was not announced, or is consumed already")
        return lambda: self._payloads.remove(message.payload)

    def _check_audit(self, message: Audit, blame: type[ProtocolError]) -> Callable[[], None]:
        return lambda: self._audits.append(message.audit)

    def _check_audited(self, message: Audited, blame: type[ProtocolError]) -> Callable[[], None]:
        if not self._audits or self._audits[0] != message.audit:
            raise blame(f"AUDITED {message.audit} does not answer the oldest AUDIT")

        def apply() -> None:
            self._audits.popleft()

        return apply

    def _check_change(self, message: Change, blame: type[ProtocolError]) -> Callable[[], None]:
        if self._attachments:
            raise blame(f"{WIRE_NAMES[type(message)]} while {len(self._attachments)} sessions are there")
        return self._power.check_change(message, blame)

    def _check_answer(self, message: Answer, blame: type[ProtocolError]) -> Callable[[], None]:
        return self._power.check_answer(message, blame)

    def _check_ping(self, message: Ping, blame: type[ProtocolError]) -> Callable[[], None]:
        if self._ping is not None:
            raise blame("PING while another is not answered")
        return lambda: setattr(self, "_ping", message.ping)

    def _check_pong(self, message: Pong, blame: type[ProtocolError]) -> Callable[[], None]:
        if self._ping != message.ping:
            raise blame(f"PONG {message.ping} answers no PING")
        return lambda: setattr(self, "_ping", None)

    def _open(self, session: int, name: str, blame: type[ProtocolError]) -> _Attachment:
        attachment = self._attachments.get(session)
        if attachment is None or attachment.ending:
            raise blame(f"{name}: session {session} is {'ending' if attachment else 'not there'}")
        return attachment

    def _in_flight(self, session: int, request: int, name: str, blame: type[ProtocolError]) -> _Attachment:
        attachment = self._attachments.get(session)
        if attachment is None or not attachment.in_flight or attachment.latest_request != request:
            raise blame(f"{name}: request {request} of session {session} is not in flight")
        return attachment


def _no_change() -> None:
    """What applying a message does that changes nothing."""


_CHECKS: dict[type, Callable[[Connection, Any, type[ProtocolError]], Callable[[], None]]] = {
    Configure: Connection._check_configure,
    Ready: Connection._check_ready,
    Fatal: Connection._check_fatal,
    AddSession: Connection._check_add_session,
    AddMessage: Connection._check_add_message,
    StopSession: Connection._check_stop_session,
    EndSession: Connection._check_end_session,
    Tokens: Connection._check_tokens,
    RequestFailed: Connection._check_request_failed,
    SessionEnded: Connection._check_session_ended,
    PayloadConsumed: Connection._check_payload_consumed,
    Audit: Connection._check_audit,
    Audited: Connection._check_audited,
    Ping: Connection._check_ping,
    Pong: Connection._check_pong,
    Sleep: Connection._check_change,
    Wake: Connection._check_change,
    UpdateWeights: Connection._check_change,
    Slept: Connection._check_answer,
    Woken: Connection._check_answer,
    Updated: Connection._check_answer,
}


class Stage(enum.Enum):
    """A stage of an incarnation."""

    NEW = "new"
    CONFIGURED = "configured"
    READY = "ready"
    FAILED = "failed"  # FATAL was sent


_ALIVE = frozenset({Stage.NEW, Stage.CONFIGURED, Stage.READY})
_CROSSING = frozenset({Stage.FAILED})  # our message may cross FATAL on the way; the worker sends none after FATAL
_SERVING = frozenset({Stage.READY}) | _CROSSING
STAGES: dict[type, frozenset[Stage]] = {
    Configure: frozenset({Stage.NEW}),
    AddSession: _SERVING,
    AddMessage: _SERVING,
    StopSession: _SERVING,
    EndSession: _SERVING,
    Audit: _SERVING,
    Ping: _ALIVE | _CROSSING,
    Sleep: _SERVING,
    Wake: _SERVING,
    UpdateWeights: _SERVING,
    Shutdown: _ALIVE | _CROSSING,
    Loading: frozenset({Stage.CONFIGURED}),
    Ready: frozenset({Stage.CONFIGURED}),
    Tokens: frozenset({Stage.READY}),
    RequestFailed: frozenset({Stage.READY}),
    SessionEnded: frozenset({Stage.READY}),
    PayloadConsumed: frozenset({Stage.READY}),
    Audited: frozenset({Stage.READY}),
    Pong: _ALIVE,
    Slept: frozenset({Stage.READY}),
    Woken: frozenset({Stage.READY}),
    Updated: frozenset({Stage.READY}),
    Fatal: _ALIVE,
}


Change: TypeAlias = Sleep | Wake | UpdateWeights
Answer: TypeAlias = Slept | Woken | Updated

_ANSWERS: dict[type[Answer], type[Change]] = {Slept: Sleep, Woken: Wake, Updated: UpdateWeights}


class PowerOrder:
    """What both ends know of a worker's power. Each check raises `blame`, or returns the change to apply, if any."""

    def __init__(self, asleep: Iterable[Tag] = ()) -> None:
        self._asleep = frozenset(asleep)
        self._change: Change | None = None  # that is not answered

    def check_session(self, blame: type[ProtocolError]) -> None:
        if self._asleep or self._change is not None:
            raise blame(f"ADD_SESSION: the worker {'sleeps' if self._asleep else 'is changing'}")

    def check_change(self, change: Change, blame: type[ProtocolError]) -> Callable[[], None]:
        if self._change is not None:
            raise blame(f"{WIRE_NAMES[type(change)]} while {WIRE_NAMES[type(self._change)]} is not answered")
        if isinstance(change, Wake) and not (change.tags and self._asleep.issuperset(change.tags)):
            raise blame("WAKE of what does not sleep")
        return lambda: setattr(self, "_change", change)

    def check_answer(self, answer: Answer, blame: type[ProtocolError]) -> Callable[[], None]:
        change, answers = self._change, _ANSWERS[type(answer)]
        if type(change) is not answers:
            raise blame(f"{WIRE_NAMES[type(answer)]} answers no {WIRE_NAMES[answers]}")

        def apply() -> None:
            self._change = None
            match change, answer:
                case Sleep(), _:
                    self._asleep = ALL_TAGS
                case Wake(tags), Woken(None):
                    self._asleep -= frozenset(tags)

        return apply
