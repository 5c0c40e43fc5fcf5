"""Observers of an engine: methods that it calls when something happens. The server makes its histograms with one."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from trioengine.core.lifecycle import Attachment, Event, Phase, PowerEvent, PowerStage
from trioengine.core.types import Cause, Usage


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ran to its end (stop or length), and whose slot is free."""

    seconds: float  # from its beginning to its last token
    decode_seconds: float  # from its first token to its last
    prompt_tokens: int
    generation_tokens: int


class Slot(enum.Enum):
    """The kinds of slots."""

    SESSION = "session"
    REQUEST = "request"


class Observer:
    """Base class: each method does nothing unless overridden. They are called synchronously, in the step of the event.

    They must not block or raise: an exception propagates into the engine. `step` and `next_tokens` are called at most
    once a step, the others a few times a request. Times are in seconds, by trio's clock. A request begins when its
    Generation is entered: its time to the first token contains the wait for a slot, if there was one.

    The engine passes its own objects, typed `object` because this module imports none of them: `session` is a Session,
    the handle of a caller, and `actor` its SessionActor; `generation` is a Generation, and `request` its Request.
    """

    def step(self, num_tokens: int) -> None:
        """The worker made a step, and computed so many tokens of prompts and answers."""

    def first_token(self, seconds: float, usage: Usage | None) -> None:
        """A request got its first token; `usage` has the time that this took on the worker."""

    def next_tokens(self, gaps: Sequence[float]) -> None:
        """Answers went on in a step: the seconds since the part before, one for each answer.

        It comes before the `request_finished` of a request that ends with the step.
        """

    def request_resumed(self) -> None:
        """A request whose worker was lost goes on with the next one."""

    # ---- requests and sessions --------------------------------------------------------------------------------------

    def request_created(self, generation: object) -> None:
        """The current task has created a Generation, which is not entered yet."""

    def request_refused(self, request: object, error: Exception) -> None:
        """Entering the Generation of a Request raises this."""

    def session_entering(self, session: object) -> None:
        """The current task begins to enter a Session."""

    def session_opened(self, session: object) -> None:
        """The Session was entered."""

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        """A SessionActor that was in this phase and attachment has handled the event, or ignored it; actions follow."""

    def request_finished(self, request: FinishedRequest) -> None:
        """A request ran to its end."""

    def session_stopped(self, seconds: float) -> None:
        """The worker has stopped a request or ended a session, so long after STOP or END was posted."""

    # ---- admission --------------------------------------------------------------------------------------------------

    def slot_taken(self, slot: Slot, id: int) -> None:
        """A session or a request is admitted, under this id."""

    def slot_refused(self, slot: Slot, error: Exception) -> None:
        """A session or a request is not admitted now; it may wait for that."""

    def line_joined(self, line: object) -> None:
        """The current task waits in a WaitingLine."""

    def line_serving(self, line: object, task: trio.lowlevel.Task) -> None:
        """It is the turn of this task, which was the first in a WaitingLine."""

    def line_served(self, line: object, task: trio.lowlevel.Task, *, is_admitted: bool) -> None:
        """The turn of this task is over; if it was not admitted, it is refused or waits on, as the first."""

    # ---- the engine and its worker ----------------------------------------------------------------------------------

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        """The engine, which was in this stage, has handled the event, or ignored it."""

    def all_aborted(self, cause: Cause) -> None:
        """Every request was aborted, by `Engine.abort_all` with this cause, or there was none."""

    def change_requested(self, change: object) -> None:
        """A sleep, a wake or an update is queued as this PowerChange."""

    def worker_retired(self) -> None:
        """The worker is to exit, because a fresh one is to take its place."""

    def engine_failed(self, error: Exception) -> None:
        """No worker can be had: the engine ends with this error."""
