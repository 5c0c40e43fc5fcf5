"""Mutants of what becomes of requests whose worker is lost."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.actors.link import Link
from trioengine.actors.recovery import Replays
from trioengine.client.session import SessionState


def _forget_the_last_token(resume: Any) -> Any:
    def mutant(self: SessionState, link: Link) -> None:
        answer = self._in_flight().answer
        assert answer is not None, "it was committed"
        last = answer.token_ids[-1:]
        del answer.token_ids[-1:]
        resume(self, link)
        answer.token_ids.extend(last)

    return mutant


def _try_beside_the_others(resume: Any) -> Any:
    def mutant(self: Replays, link: Link) -> None:
        resume(self, link)
        for session in self._sessions.suspended:
            self._resume(session, link)

    return mutant


REPLAY_MUTANTS = (
    Mutant(
        "F18b",
        "what goes on with another worker says a token twice",
        replaced(SessionState, "resume", _forget_the_last_token),
        shows="the model's|of none of the weights",
        machine="PowerMachine",
    ),
    Mutant(
        "F18c",
        "a request is blamed for a death that another one caused",
        replaced(Replays, "resume", _try_beside_the_others),
        shows="is lost",
        machine="PowerMachine",
    ),
)
