"""Mutants of the recovery of requests whose worker is lost."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.actors.link import Link
from trioengine.actors.recovery import Recovery
from trioengine.actors.session_actor import SessionActor


def _forget_the_last_token(resume: Any) -> Any:
    def mutant(self: SessionActor, link: Link) -> None:
        output = self._in_flight().output
        assert output is not None, "it was committed"
        last = output.token_ids[-1:]
        del output.token_ids[-1:]
        resume(self, link)
        output.token_ids.extend(last)

    return mutant


def _try_beside_the_others(resume: Any) -> Any:
    def mutant(self: Recovery, link: Link) -> None:
        resume(self, link)
        for session in self._sessions.suspended:
            self._resume(session, link)

    return mutant


REPLAY_MUTANTS = (
    Mutant(
        "F18b",
        "what goes on with another worker says a token twice",
        replaced(SessionActor, "resume", _forget_the_last_token),
        shows="the model's|of none of the weights",
        machine="PowerMachine",
    ),
    Mutant(
        "F18c",
        "a request is blamed for a death that another one caused",
        replaced(Recovery, "resume", _try_beside_the_others),
        shows="is lost",
        machine="PowerMachine",
    ),
)
