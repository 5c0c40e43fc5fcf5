"""Mutants of the session: its table, its handle, its history."""

from __future__ import annotations

from typing import Any

import trio
from mutant import Mutant, not_ignored, replaced, rewritten

from trioengine.actors.generation import Generation, ReadableRequest
from trioengine.actors.request import Request
from trioengine.actors.session import Session
from trioengine.actors.session_actor import SessionActor
from trioengine.actors.sessions import Sessions
from trioengine.core.lifecycle import Action, Attachment, Event, Phase, Transition
from trioengine.core.types import Cause

_A, _D, _X = Attachment.ATTACHED, Attachment.DETACHED, Attachment.DETACHING


def _forget_cancelled_preparation(abort_request: Any) -> Any:
    def mutant(self: SessionActor, request: Request, cause: Cause) -> bool:
        return self.phase is not Phase.PREPARING and bool(abort_request(self, request, cause))

    return mutant


def _abort_the_first(abort: Any) -> Any:
    def mutant(self: Sessions, request: int | str, cause: Cause) -> int:
        called = ((session, each) for session in self.all for each in session.requests if each.is_called(request))
        session, found = next(called, (None, None))
        return 0 if session is None or found is None else int(session.abort_request(found, cause))

    return mutant


def _swallow_cancellation(read: Any) -> Any:
    async def mutant(self: Generation) -> Any:
        while True:
            try:
                return await read(self)
            except trio.Cancelled:
                continue

    return mutant


def _await_before_the_end(aexit: Any) -> Any:
    async def mutant(self: Session, *exc: Any) -> None:
        await trio.lowlevel.checkpoint()
        await aexit(self, *exc)

    return mutant


def _keep_what_was_not_read(leave: Any) -> Any:
    def mutant(self: SessionActor, request: Request) -> None:
        request.keep_partial = True
        leave(self, request)

    return mutant


SESSION_MUTANTS = (
    Mutant(
        "F1",
        "a request whose caller is cancelled while it is prepared is never removed",
        replaced(SessionActor, "abort_request", _forget_cancelled_preparation),
        shows=r"requests are in flight, the worker has none|goes on|abort(_all)?\(\) returned"
        r"|aborted by \w+, there were",
    ),
    Mutant(
        "F2",
        "a session that ends between register and submit is never ended on the worker",
        rewritten(Phase.PREPARING, _A, Event.END, Transition(Phase.ENDED, _X, (Action.SETTLE_ABORTED,))),
        shows="ended, and still on the worker|the link knows sessions|were never ended|waits? forever",
    ),
    Mutant(
        "F7",
        "an abort gives the slot back before the worker has acted on it",
        rewritten(
            Phase.RUNNING,
            _A,
            Event.ABORT,
            Transition(Phase.IDLE, _A, (Action.POST_STOP_SESSION, Action.SETTLE_ABORTED)),
        ),
        shows="not the session's|in flight|committed was|rows come after"
        "|waits? forever|the model's is|was ended by error|has its request",
    ),
    Mutant(
        "F8",
        "a second end raises",
        not_ignored(Event.END, Phase.ENDED),
        shows="does not end|end while ended|and <Session . ended",
    ),
    Mutant(
        "F9",
        "a read swallows its cancellation, and goes on",
        replaced(Generation, "__anext__", _swallow_cancellation),
        shows="Livelock",
    ),
    Mutant(
        "F10",
        "the end is behind an await in a dying scope",
        replaced(Session, "__aexit__", _await_before_the_end),
        shows=r"was left and has not ended|attached are set\(\)",
    ),
    Mutant(
        "F26",
        "the turn after a disconnect sees the answer that was taken back",
        replaced(SessionActor, "leave", _keep_what_was_not_read),
        shows="committed was|the model's|the prompt has",
    ),
    Mutant(
        "F41",
        "the end of a session strands the reader of its request",
        rewritten(Phase.ENDING, _X, Event.SESSION_ENDED, Transition(Phase.ENDED, _D, (Action.FREE_SESSION,))),
        shows=r"its time is over|(readers|callers|it) waits? forever|its reader waits|in flight|abort\(\) returned"
        "|pins and holders|are counted to run",
    ),
    Mutant(
        "F62",
        "an abort by a label ends one of the requests that share it",
        replaced(Sessions, "abort", _abort_the_first),
        shows=r"abort\(\) returned",
    ),
    Mutant(
        "F62b",
        "an abort by an id or a label ends all requests",
        replaced(ReadableRequest, "is_called", lambda is_called: lambda self, name: True),
        shows=r"abort\(\) returned",
    ),
)
