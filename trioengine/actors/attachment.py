"""The worker's side of a session: the tokens that the worker holds of it, and the messages that change them.

The table in `core.lifecycle` decides when to post which message, by its actions. Messages are effects: they leave after
the transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import trio

from trioengine.actors.effects import Effects
from trioengine.actors.images import payload_of
from trioengine.actors.link import Link
from trioengine.actors.observer import Observer
from trioengine.actors.payload import Payload
from trioengine.actors.request import Request
from trioengine.core.lifecycle import Action
from trioengine.core.messages import Adapter, AddMessage, AddSession, EndSession, Message, StopSession
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.chat_tokenizer import PlacedImage


@dataclass(frozen=True, slots=True)
class Post:
    """Effect: post a message, and pass the payloads of its images, each pinned. If that fails, `crash` the session."""

    link: Link
    message: Message
    payloads: tuple[Payload, ...]
    crash: Callable[[Exception], None]


class WorkerAttachment:
    """A session as a worker holds it: from ADD_SESSION to SESSION_ENDED or the worker's death, and then anew."""

    __slots__ = ("_adapter", "_crash", "_effects", "_held", "_link", "_observers", "_stop_posted_at")

    def __init__(
        self,
        effects: Effects,
        observers: Sequence[Observer],
        adapter: Adapter | None,
        crash: Callable[[Exception], None],
    ) -> None:
        self._effects = effects
        self._observers = observers
        self._adapter = adapter  # of all requests of the session
        self._crash = crash
        self._link: Link | None = None
        self._held: TokenIds = token_ids()  # known to be held by the worker
        self._stop_posted_at: float | None = None  # STOP or END, on trio's clock, until the worker has followed

    def num_held(self, prompt: TokenIds) -> int:
        """Tokens at the prompt's beginning that the worker holds."""
        return _common_prefix(self._held, prompt)

    def begin(self, link: Link) -> None:
        """Post to this worker from now on."""
        self._link = link

    def carry_out(self, action: Action, session: int, request: Request | None, message: AddMessage | None) -> None:
        """Post the message of an action of the table; `message` is the ADD_MESSAGE of the request in flight."""
        match action, request, message:
            case Action.POST_ADD_SESSION, _, _:
                self._post(AddSession(session, self._adapter))
                self._held = token_ids()
            case Action.POST_ADD_MESSAGE, Request(images=images), AddMessage():
                self._add_message(message, images)
            case Action.POST_STOP_SESSION, Request(id=int(request_id)), _:
                self._post_stop(StopSession(session, request_id))
            case Action.POST_END_SESSION, _, _:
                self._post_stop(EndSession(session))
            case _:
                raise AssertionError(f"{action.value}: every state with a request in the table has its request")

    def _add_message(self, message: AddMessage, images: Iterable[PlacedImage]) -> None:
        """Pin the payloads of the message's images; the link gives the pins back."""
        payloads = tuple(payload_of(placed.image) for placed in images)
        for payload in payloads:
            payload.pin()
        self._post(message, payloads)
        self._held = self._held[: message.base]
        self._held.extend(message.token_ids)

    def receive(self, ids: TokenIds) -> None:
        """The worker has generated these tokens, and holds them."""
        self._held.extend(ids)

    def report_stop(self) -> None:
        """The worker has followed a STOP_SESSION or END_SESSION, if one was posted: report how long that took."""
        if self._stop_posted_at is not None:
            seconds = trio.current_time() - self._stop_posted_at
            self._stop_posted_at = None
            for observer in self._observers:
                observer.session_stopped(seconds)

    def drop(self) -> None:
        """The worker holds nothing of the session any more."""
        self.report_stop()
        self._link = None
        self._held = token_ids()

    def _post(self, message: Message, payloads: tuple[Payload, ...] = ()) -> None:
        assert self._link is not None, "the table posts only while attached"
        self._effects.append(Post(self._link, message, payloads, self._crash))

    def _post_stop(self, message: Message) -> None:
        self._post(message)
        if self._stop_posted_at is None:  # an END after a STOP does not begin anew
            self._stop_posted_at = trio.current_time()


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
