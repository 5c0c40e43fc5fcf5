"""The order of SLEEP, WAKE and UPDATE_WEIGHTS: one at a time.

Until the answer, and while any tag sleeps, no session is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from trioengine.core.errors import ProtocolError
from trioengine.core.messages import WIRE_NAMES, Sleep, Slept, Updated, UpdateWeights, Wake, Woken
from trioengine.core.tag import ALL_TAGS, Tag

Change: TypeAlias = Sleep | Wake | UpdateWeights
Answer: TypeAlias = Slept | Woken | Updated

_ANSWERS: dict[type[Answer], type[Change]] = {Slept: Sleep, Woken: Wake, Updated: UpdateWeights}


class PowerOrder:
    """What both ends know of a worker's power. Each check raises `blame`, or returns the change to apply, if any."""

    def __init__(self, asleep: Iterable[Tag] = ()) -> None:
        self._asleep = frozenset(asleep)
        self._change: Change | None = None  # that is not answered

    def check_session(self, blame: type[ProtocolError]) -> None:
        if self._asleep or self._change is not None:
            raise blame(f"ADD_SESSION: the worker {'sleeps' if self._asleep else 'is changing'}")

    def check_change(self, change: Change, blame: type[ProtocolError]) -> Callable[[], None]:
        if self._change is not None:
            raise blame(f"{WIRE_NAMES[type(change)]} while {WIRE_NAMES[type(self._change)]} is not answered")
        if isinstance(change, Wake) and not (change.tags and self._asleep.issuperset(change.tags)):
            raise blame("WAKE of what does not sleep")
        return lambda: setattr(self, "_change", change)

    def check_answer(self, answer: Answer, blame: type[ProtocolError]) -> Callable[[], None]:
        change, answers = self._change, _ANSWERS[type(answer)]
        if type(change) is not answers:
            raise blame(f"{WIRE_NAMES[type(answer)]} answers no {WIRE_NAMES[answers]}")

        def apply() -> None:
            self._change = None
            match change, answer:
                case Sleep(), _:
                    self._asleep = ALL_TAGS
                case Wake(tags), Woken(None):
                    self._asleep -= frozenset(tags)

        return apply
