"""Mutants of Realtime sessions that outlive their connections."""

from __future__ import annotations

from typing import Any

import trio
from mutant import Mutant, replaced

from trioengine.serve.realtime import connection
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.realtime.resumable import ResumableSessions
from trioengine.serve.realtime.window import Window


def _one_too_early(continue_after: Any) -> Any:
    def mutant(self: Outbox, last: int) -> None:
        continue_after(self, max(last - 1, self._oldest - 1))

    return mutant


def _lose_what_was_being_sent(detach: Any) -> Any:
    def mutant(self: Outbox) -> None:
        for message in self._sending[-1:]:
            self._size -= len(message.data)
            self.held.give_back(len(message.data))
            self._num_sent += 1
        self._sending = self._sending[:-1]
        detach(self)

    return mutant


def _count_from_the_first_loss(begin: Any) -> Any:
    def mutant(self: Window) -> None:
        first = vars(self).setdefault("first", trio.current_time())
        begin(self)
        assert self._scope is not None, "it is open"
        self._scope.deadline = first + self._seconds

    return mutant


def _wait_forever(passed: Any) -> Any:
    async def mutant(self: Window, outbox: Outbox) -> None:
        await trio.sleep_forever()

    return mutant


def _keep_all(trim: Any) -> Any:
    def mutant(self: Outbox) -> None:
        pass

    return mutant


def _keep_the_bytes(trim: Any) -> Any:
    def mutant(self: Outbox) -> None:
        before = self.held.num_bytes
        trim(self)
        self.held.charge(before - self.held.num_bytes)

    return mutant


def _leave_the_sender(attach: Any) -> Any:
    def mutant(self: RealtimeConnection, *args: Any) -> Any:
        detach = self._outbox.detach
        if self._carrier is not None:
            vars(self._outbox)["detach"] = lambda: None
        try:
            return attach(self, *args)
        finally:
            vars(self._outbox)["detach"] = detach

    return mutant


def _wait_on(close: Any) -> Any:
    return lambda self: None


def _sleep_with_them(cut_windows: Any) -> Any:
    return lambda self: None


RESUME_MUTANTS = (
    Mutant(
        "F86",
        "the last event before a resumption is sent again",
        replaced(Outbox, "continue_after", _one_too_early),
        shows=r"sequence_number is not",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F86b",
        "the event that was being sent when the connection was lost is lost",
        replaced(Outbox, "detach", _lose_what_was_being_sent),
        shows=r"sequence_number is not|some were dropped|have come|pop from an empty deque",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F86c",
        "two connections send the events of a session that was taken over",
        replaced(RealtimeConnection, "attach", _leave_the_sender),
        shows=r"sequence_number is not|have come|never answered",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F87",
        "the window of a second loss ends with that of the first",
        replaced(Window, "open", _count_from_the_first_loss),
        shows="s ago, and it is over",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F87b",
        "a session whose window has passed goes on",
        replaced(Window, "passed", _wait_forever),
        shows="sessions go on|resumes a session that is over|outlive their windows|are kept for a slow client",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F87c",
        "the window passes although the client is back",
        replaced(Window, "close", _wait_on),
        shows="a goodbye with the code 1000|s ago, and it is over",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F87d",
        "a session whose client is away outlives a sleep",
        replaced(ResumableSessions, "_cut_windows", _sleep_with_them),
        shows="sessions go on|resumes a session that is over",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F88",
        "the events that are kept no longer are counted on",
        replaced(Outbox, "_trim", _keep_the_bytes),
        shows="bytes are counted",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F87e",
        "a session that its client has closed goes on until its window has passed",
        replaced(connection, "FINAL", lambda final: ()),
        shows="sessions go on|resumes a session that is over",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F88b",
        "all events that were sent are kept",
        replaced(Outbox, "_trim", _keep_all),
        shows="of sent events are kept",
        machine="RealtimeMachine",
    ),
)
