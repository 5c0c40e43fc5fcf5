"""The opening of a session: its first turns, and its wait for a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from trioengine.aio.concurrency import NEVER, Deadline
from trioengine.core.checks import check_history, check_wait
from trioengine.text.chat_template import NO_VARIABLES


class SessionOpening:
    """How a session is opened: by a user who enters it, or, with `by_request`, by its one request."""

    __slots__ = ("by_request", "deadline", "history", "is_entered", "scope", "variables", "wait")

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] = NO_VARIABLES,
        wait: bool | None = None,
        deadline: Deadline = NEVER,
        by_request: bool = False,
    ) -> None:
        """Raises RequestRejected for a history that is not a list, and for a `wait` that is not a bool."""
        self.history = check_history(history)  # None once it is taken into the conversation
        self.variables = variables  # of the chat template
        self.wait = check_wait(wait)
        self.deadline = deadline  # of the admission
        self.by_request = by_request
        self.is_entered = False
        self.scope = trio.CancelScope()  # abort_all, a sleep and the end cut the wait for a slot short

    @property
    def is_under_way(self) -> bool:
        """Whether a user has entered the session, so that its end cuts the wait for a slot short."""
        return self.is_entered and not self.by_request
