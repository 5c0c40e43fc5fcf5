"""A session as one worker incarnation holds it: what it is known to hold, and the link on which to say more."""

from __future__ import annotations

from dataclasses import dataclass

from trioengine.actors.link import Link
from trioengine.core.messages import AddMessage, AddSession, EndSession, StopSession, TokenIds, token_ids


@dataclass(frozen=True, slots=True)
class Posting:
    """An ADD_MESSAGE that is known to fit a frame of the link on which it is to be posted."""

    link: Link
    message: AddMessage
    payload: bytes


class WorkerSession:
    """The worker's side of a session. The table in `core.lifecycle` says when to post what."""

    def __init__(self) -> None:
        self._link: Link | None = None  # of the attachment
        self._held: TokenIds = token_ids()  # what the attachment is known to hold

    def base(self, prompt: TokenIds) -> int:
        """How many tokens of the prompt need not be sent."""
        return _common_prefix(self._held, prompt)

    def attach(self, link: Link) -> None:
        """What is posted from now on goes to this incarnation."""
        self._link = link

    def detach(self) -> None:
        """The incarnation is dead, and what it held is gone."""
        self._link = None
        self._held = token_ids()

    def add(self, session: int) -> None:
        self._attached_link.post(AddSession(session))
        self._held = token_ids()

    def add_message(self, posting: Posting) -> None:
        message = posting.message
        self._attached_link.post(message, posting.payload)
        self._held = self._held[: message.base]
        self._held.extend(message.token_ids)

    def receive(self, ids: TokenIds) -> None:
        """It generated these, and holds them."""
        self._held.extend(ids)

    def stop(self, session: int, request: int) -> None:
        self._attached_link.post(StopSession(session, request))

    def end(self, session: int) -> None:
        self._attached_link.post(EndSession(session))

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
