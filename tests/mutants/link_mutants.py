"""Mutants of the link, of the supervisor, and of the handling of the worker's messages."""

from __future__ import annotations

from typing import Any

import trio
from mutant import Mutant, replaced

from trioengine.actors.link import Link
from trioengine.actors.session_actor import SessionActor
from trioengine.actors.sessions import Sessions
from trioengine.actors.supervisor import Supervisor
from trioengine.core.lifecycle import Phase

_WRITE_TIMEOUT = 0.1  # seconds


def _tell_nobody_who_runs(on_worker_lost: Any) -> Any:
    def mutant(self: SessionActor) -> None:
        if self.phase is not Phase.RUNNING:
            on_worker_lost(self)

    return mutant


class _OldestFirst(dict[int, Any]):
    def __getitem__(self, key: int) -> Any:
        return super().__getitem__(min(self, default=key))


def _find_the_oldest(init: Any) -> Any:
    def mutant(self: Sessions, effects: Any) -> None:
        init(self, effects)
        self.by_id = _OldestFirst()

    return mutant


def _cancel_the_writer(write: Any) -> Any:
    async def mutant(self: Link) -> None:
        while True:
            with trio.move_on_after(_WRITE_TIMEOUT):
                await write(self)
                return

    return mutant


class _Leftovers:
    """What the link of a dead worker had still to write goes to the next one."""

    def __init__(self) -> None:
        self.last: Link | None = None

    def pass_on(self, init: Any) -> Any:
        def mutant(link: Link, process: Any) -> None:
            init(link, process)
            last = self.last
            if last is not None and last.process.pid + 1 == process.pid:
                link._outbox.extend(last._outbox)
            self.last = link

        return mutant


def _unshielded(init: Any) -> Any:
    def mutant(self: Supervisor, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self._scope.shield = False

    return mutant


LINK_MUTANTS = (
    Mutant(
        "F18",
        "the worker dies, and its readers are not told",
        replaced(SessionActor, "on_worker_lost", _tell_nobody_who_runs),
        shows="waits? forever|the worker holds sessions|still on the worker|in flight, the worker has none"
        "|the link knows sessions|session slots are not free",
    ),
    Mutant(
        "F27",
        "what was said for one session reaches another",
        replaced(Sessions, "__init__", _find_the_oldest),
        shows="waits? forever|in flight|the model's|ended by error|the worker holds sessions"
        "|LocalProtocolError|every state with a request|only while attached|other logprobs than",
    ),
    Mutant(
        "F45",
        "a writer is cancelled, and tears a frame",
        replaced(Link, "write", _cancel_the_writer),
        shows="still on the worker|the worker holds sessions|in flight|broke the protocol|waits? forever|ended with -9"
        "|no worker was harmed|goes on for",
    ),
    Mutant(
        "F46",
        "frames for a dead worker reach the next one",
        replaced(Link, "__init__", _Leftovers().pass_on),
        shows="the engine broke the protocol: .* while the connection is new",
    ),
    Mutant(
        "F47",
        "the writer dies with the scopes whose ends it has to write",
        replaced(Supervisor, "__init__", _unshielded),
        shows="a healthy worker ended with -9",
    ),
)
