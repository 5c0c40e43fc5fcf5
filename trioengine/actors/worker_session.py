"""A session as one worker incarnation holds it: what it is known to hold, and the link on which to say more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import trio

from trioengine.actors.images import payload_of
from trioengine.actors.link import Link
from trioengine.actors.observer import Observer
from trioengine.actors.payload import Payload
from trioengine.core.messages import AddMessage, AddSession, EndSession, StopSession
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.chat_tokenizer import PlacedImage


@dataclass(frozen=True, slots=True)
class Posting:
    """An ADD_MESSAGE that is known to fit a frame of the link on which it is to be posted, and its images' payloads."""

    link: Link
    message: AddMessage
    encoded: bytes
    payloads: tuple[Payload, ...] = ()  # of `message.images`

    @staticmethod
    def of(link: Link, message: AddMessage, images: Iterable[PlacedImage]) -> Posting:
        """`images` are those of the prompt. Raises FrameTooLarge if the message does not fit."""
        payloads = tuple(payload_of(placed.image) for placed in images)
        return Posting(link, message, link.encode(message), payloads)


class WorkerSession:
    """The worker's side of a session. The table in `core.lifecycle` says when to post what."""

    __slots__ = ("_held", "_link", "_observers", "_told_at")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._link: Link | None = None  # of the attachment
        self._held: TokenIds = token_ids()  # what the attachment is known to hold
        self._observers = observers
        self._told_at: float | None = None  # to stop or to end, on trio's clock, while it has not

    def base(self, prompt: TokenIds) -> int:
        """How many tokens of the prompt need not be sent."""
        return _common_prefix(self._held, prompt)

    def attach(self, link: Link) -> None:
        """What is posted from now on goes to this incarnation."""
        self._link = link

    def detach(self) -> None:
        """The incarnation is dead, and what it held is gone."""
        self.let_go()
        self._link = None
        self._held = token_ids()

    def add(self, session: int) -> None:
        self._attached_link.post(AddSession(session))
        self._held = token_ids()

    def add_message(self, posting: Posting) -> None:
        message = posting.message
        link = self._attached_link
        link.post(message, posting.encoded)
        for image, payload in zip(message.images, posting.payloads, strict=True):
            link.hand_over(image.payload, payload)
        self._held = self._held[: message.base]
        self._held.extend(message.token_ids)

    def receive(self, ids: TokenIds) -> None:
        """It generated these, and holds them."""
        self._held.extend(ids)

    def stop(self, session: int, request: int) -> None:
        self._attached_link.post(StopSession(session, request))
        self._tell()

    def end(self, session: int) -> None:
        self._attached_link.post(EndSession(session))
        self._tell()

    def let_go(self) -> None:
        """It has done what it was told last, if it was told to stop or to end."""
        if self._told_at is not None:
            seconds = trio.current_time() - self._told_at
            self._told_at = None
            for observer in self._observers:
                observer.session_stopped(seconds)

    def _tell(self) -> None:
        if self._told_at is None:  # an END after a STOP does not begin anew
            self._told_at = trio.current_time()

    @property
    def _attached_link(self) -> Link:
        assert self._link is not None, "the table posts only while attached"
        return self._link


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many tokens the two begin with in common."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length  # left[:low] is common, left[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low
