"""Sleeps, wakes and updates that were asked for, and what the engine must be after them.

The model knows what was asked for, in which order, and what came of it; not how. Each method that watches is a `mutate`
for `Machine._watch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trioengine.actors.power import DO_NOT_WAKE, PowerActor
from trioengine.core.errors import TransitionFailed
from trioengine.core.power import ALL_TAGS, Tag

UNFIT = ("other", "misshapen")  # paths at which no weights of the model lie


@dataclass
class Change:
    """One that was asked for; `made` is the engine's own record of it, which says when it is done."""

    name: str
    arguments: tuple[Any, ...]
    closes: bool  # admission, while it is not done
    made: Any

    @property
    def over(self) -> bool:
        return bool(self.made.done.is_set())

    @property
    def failure(self) -> TransitionFailed | None:
        failure: TransitionFailed | None = self.made.failure
        return failure


class Changes:
    """Those of one engine, and the model: what sleeps, at which level, and which weights there are."""

    def __init__(self) -> None:
        self.asked: list[Change] = []
        self.asleep: frozenset[Tag] = frozenset()
        self.level = 0
        self.paths = ["", "toy"]  # by version
        self.is_asking = False  # in this step, for what closes admission
        self._discarded = False
        self._awaits_update = False

    # ---- what is watched ------------------------------------------------------------------------------------------

    def of_sleeps(self, ask: Any) -> Any:
        """For `PowerActor.sleep`."""
        return self._watched(ask, "sleep", closes=True)

    def of_wakes(self, ask: Any) -> Any:
        """For `PowerActor.wake`."""
        return self._watched(ask, "wake", closes=False)

    def of_updates(self, ask: Any) -> Any:
        """For `PowerActor.update_weights`."""
        return self._watched(ask, "update", closes=True)

    def _watched(self, ask: Callable[..., Any], name: str, *, closes: bool) -> Any:
        def watched(actor: PowerActor, *args: Any, **more: Any) -> Any:
            self.is_asking = closes
            try:
                made = ask(actor, *args, **more)
            finally:
                self.is_asking = False
            self.asked.append(Change(name, (*args, *more.values()), closes, made))
            return made

        return watched

    @property
    def may_be_closed(self) -> bool:
        """Whether there is a reason to admit nothing."""
        return self.is_asking or bool(self.asleep or self.running)

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be admitted: something sleeps, or is to. A wake opens before it is done."""
        running = self.running
        return any(change.closes for change in running) or (bool(self.asleep) and not running)

    @property
    def running(self) -> list[Change]:
        return [change for change in self.asked if not change.over]

    # ---- the model ------------------------------------------------------------------------------------------------

    def learn(self, excuse: Callable[[Change], bool]) -> None:
        """Take in those that are done, in their order; one that failed must be excused, or impossible."""
        while self.asked and self.asked[0].over:
            change = self.asked.pop(0)
            impossible = self._impossible(change)
            if change.failure is None:
                assert impossible is None, f"{change.name}{change.arguments} was done, but {impossible}"
                self._do(change)
            else:
                assert impossible or excuse(change), f"{change.name}{change.arguments}: {change.failure!r}"
                if str(change.failure).startswith(DO_NOT_WAKE):
                    self._do(change)
                    self.asleep |= {Tag.WEIGHTS}

    def _impossible(self, change: Change) -> str | None:
        match change.name, change.arguments:
            case "sleep", (1, *_) if self.level == 2 and Tag.WEIGHTS in self.asleep:
                return "it sleeps deeper"
            case "update", (str(path), *_) if path in UNFIT:
                return "the weights do not fit"
        return None

    def _do(self, change: Change) -> None:
        match change.name, change.arguments:
            case "sleep", (int(level), *_):
                if (self.asleep, self.level) != (ALL_TAGS, level):
                    self._discarded = level == 2
                self._awaits_update = False
                self.asleep, self.level = ALL_TAGS, level
            case "wake", (tags, bool(reload)):
                named = (tags,) if isinstance(tags, str) else tags
                wanted = ALL_TAGS if named is None else frozenset(map(Tag, named))
                if self._discarded and not reload and wanted & self.asleep & {Tag.WEIGHTS}:
                    self._awaits_update = True
                    wanted -= {Tag.WEIGHTS}
                self.asleep -= wanted
                if Tag.WEIGHTS in wanted:
                    self._discarded = self._awaits_update = False
            case "update", (str(path), *_):
                self.paths.append(path)
                self._discarded = False
                if self._awaits_update:
                    self._awaits_update = False
                    self.asleep -= {Tag.WEIGHTS}
