"""A Realtime session as its client knows it: the connections that carry it, their events, and when it may be over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trioengine.actors.observer import Observer
from trioengine.core.lifecycle import PowerEvent, PowerStage
from trioengine.core.types import Cause
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.promptness import ROUNDING
from trioengine.testing.fuzz.realtime_conversation import Conversation
from trioengine.testing.fuzz.realtime_shapes import check_event

_PATH = "/v1/realtime"
_ENDS = (Harm.SLEEP, Harm.CLOSING, Harm.SHUTDOWN, Harm.ABORT_ALL, Harm.DROPS)  # of a session whose client is away


class Carrier(Protocol):
    """A connection of a session."""

    @property
    def can_step_in(self) -> bool: ...
    @property
    def stream(self) -> Any: ...
    @property
    def has_begun(self) -> bool: ...
    def mark(self) -> None: ...


class Session:
    """Follows a session over its connections. Raises AssertionError for an event or an end that is wrong.

    With a `window`, in seconds, it outlives a lost connection for that long; without one, it ends with its connection.
    """

    def __init__(
        self,
        conversation: Conversation,
        faults: InjectedFaults,
        clock: Callable[[], float],
        window: float = 0.0,
        *,
        kept: int = 0,
        sizes: Callable[[str], Sequence[int]],
        saw: Callable[[str], None],
        is_strange: bool = False,
    ) -> None:
        """`kept` is how many characters of events the server keeps for a client that was lost.

        `sizes` returns the characters of each event, by the prefix of their ids; `saw` counts a rare state. A strange
        session has a token that the server never made.
        """
        self.conversation = conversation
        self.window = window
        self.now = clock
        self.token = "0" * 48 if is_strange else ""  # until the server has sent it
        self.is_over = is_strange  # for sure
        self.lost = ""  # how the connection was lost on which its client sent; "" once another one has resumed it
        self.has_refused = False  # it has refused a client, as it was over
        self.speaker: Carrier | None = None  # on which its client sends
        self._faults = faults
        self._kept = kept
        self._sizes = sizes
        self._saw = saw
        self._clients: list[Carrier] = []
        self._rivals: dict[Carrier, list[Carrier]] = {}
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._may_be_over = False
        self._attached, self._attached_at = Life(faults), clock()  # the last time at which its client was surely there
        self._away_since: float | None = None  # the rest at which its client was found to be away
        self._is_cut = False  # while its client was away something has happened that ends it
        self._is_closed = False
        self._asked_from = 0  # the lowest `last` of a connection that may not have all events yet

    # ---- connections ------------------------------------------------------------------------------------------------

    def target(self, last: int) -> str:
        """The target of a handshake: for a new session, or for this one from the event after `last` on."""
        if self.token:
            return f"{_PATH}?session={self.token}&last_seq={last}"
        return f"{_PATH}?resume={self.window:g}" if self.window else _PATH

    def ask_after(self, count: int) -> int:
        """Return the number of the last event, less `count`: the client asks for the events after it."""
        last = max(0, len(self._events) - 1 - count)
        self._asked_from = min(self._asked_from, last)
        return last

    def next_number(self) -> int:
        return next(self._numbers)

    def join(self, client: Carrier) -> tuple[Life, float]:
        """Another connection begins, on which the client sends from now on. Returns the time of its beginning."""
        self._rivals[client] = [each for each in self._clients if not (each.stream.closed or each.has_begun)]
        for each in self._clients:
            self._rivals[each].append(client)
        self._clients.append(client)
        self._away_since, self._is_cut, self._is_closed = None, False, False
        self.speaker = client
        return Life(self._faults), self.now()

    def step_back(self, client: Carrier) -> None:
        """A connection is of no more use: the client goes back to one before it, if that is still open."""
        if client is not self.speaker:
            return
        self.speaker = next((each for each in reversed(self._clients) if each is not client and each.can_step_in), None)
        if self.speaker is not None:
            self.speaker.mark()

    # ---- events -----------------------------------------------------------------------------------------------------

    def resumed(self) -> None:
        """The first event has come on a connection that resumes it."""
        if self.lost:
            self._saw(f"{self.lost}, and come back")
            self.lost = ""
        if self.conversation.responses:
            self._saw("come back while a response is active")

    def take(self, event: dict[str, Any], number: int, attached: tuple[Life, float]) -> None:
        """Take the event with this number, of a connection that began then; it may come again after a resumption."""
        check_event(event, number, "toy", window=self.window)
        if number < len(self._events):
            assert event == self._events[number], f"{self._events[number]} comes again as {event}"
            self._saw("an event is sent again")
        else:
            if number == 0 and self.window:
                self.token = event["resume"]["token"]
            self._events.append(event)
            self.conversation.take(event)
        if attached[1] >= self._attached_at:
            self._attached, self._attached_at = attached

    # ---- its end ----------------------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Whether the server was drained."""
        return self._faults.closing

    def may_end(self) -> None:
        """Note an event that may end it."""
        self._may_be_over = True

    def closed(self, client: Carrier) -> None:
        """The server has answered the close of a connection, which ends it if no other one has it."""
        self._is_closed = all(each is client or each.stream.closed for each in self._clients)

    def cut(self) -> None:
        """Note an event that ends it if its client is away."""
        if self._away_since is not None:
            self._is_cut = self._may_be_over = True

    def _unread(self, last: int) -> int:
        """Characters of the events after this one, read by the client or not."""
        return sum(self._sizes_of_events()[last + 1 :])

    def _sizes_of_events(self) -> Sequence[int]:
        """Characters of each event that the server has put; the session must have begun."""
        prefix, _, _ = self._events[0]["event_id"].rpartition("_")
        return self._sizes(prefix)

    def refused(self, status: int, answer: dict[str, Any], last: int) -> None:
        """Check the answer to a handshake that is refused; another one may be refused for want of a connection."""
        code = answer["error"]["code"]
        if code in ("session_not_found", "events_dropped"):
            self.not_resumed(code, last)
        else:
            assert status >= 408, f"a handshake is refused: {answer}"

    def not_resumed(self, code: str, last: int) -> None:
        """Check the reason why a connection could not resume it from the event after `last` on."""
        self._saw(f"a client is refused: {code}")
        if code == "events_dropped":
            unread = self._unread(last)
            assert unread > self._kept, f"{unread} characters of events come after {last}, and some were dropped"
            return
        assert code == "session_not_found", f"a session is not resumed: {code}"
        self.has_refused = True
        age = self.now() - self._attached_at
        assert self._may_have_ended(), f"its client was there {age:g} s ago, and it is over"

    def check_taken_over(self, client: Carrier) -> None:
        """Check a close of the server's, because another connection has the session."""
        assert self._rivals[client], "another connection has the session, and there is none"
        self._saw("a connection is taken over")

    def _may_have_ended(self) -> bool:
        is_late = self.now() - self._attached_at >= self.window - ROUNDING
        is_harmed = self._faults.hit(self._attached, *_ENDS)
        is_overfull = not self.is_over and self._unread(self._asked_from) > self._kept
        return self.is_over or self._may_be_over or is_late or is_harmed or is_overfull

    # ---- at rest ----------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """The client is there, and has all events."""
        self._attached, self._attached_at = Life(self._faults), self.now()
        self._asked_from = len(self._events)
        self._may_be_over = False
        if self.token:
            put, come = len(self._sizes_of_events()), len(self._events)
            assert put == come, f"there are {put} events, and {come} have come"

    def rest(self) -> None:
        """Note whether its client is away, and whether it must be over."""
        if self._away_since is None and all(client.stream.closed for client in self._clients):
            self._away_since = self.now()
        if self._away_since is None or self.is_over:
            return
        self.is_over = self._is_closed or self._is_cut or self.now() >= self._away_since + self.window
        if self.is_over and self.window:
            self._saw("a session is cut, as its client is away" if self._is_cut else "a window passes")


class Cuts(Observer):
    """Ends the sessions whose clients are away when the engine falls asleep, is updated, ends, or aborts all."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        if event in (PowerEvent.SLEEP, PowerEvent.UPDATE, PowerEvent.DRAIN, PowerEvent.CLOSE):
            self.all_aborted(Cause.ABORT_ALL)

    def all_aborted(self, cause: Cause) -> None:
        for session in self._sessions:
            session.cut()
