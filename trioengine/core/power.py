"""Sleep and wake: the tags of memory, which of them sleep, and the worker that the engine wants in each stage.

The stages of the engine, and their transitions, are in core/lifecycle.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from trioengine.core.errors import TransitionFailed
from trioengine.core.lifecycle import PowerStage


class Tag(enum.StrEnum):
    """A part of the worker's memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


TagName: TypeAlias = Literal["weights", "kv_cache"] | Tag
ALL_TAGS = frozenset(Tag)


def sorted_tags(tags: Iterable[Tag]) -> tuple[Tag, ...]:
    """Return the tags in the order of their names, as on the wire."""
    return tuple(sorted(tags, key=lambda tag: tag.value))


class WeightsState(enum.Enum):
    """The state of the weights."""

    AWAKE = "awake"
    KEPT = "kept"  # in host memory, or updated while asleep: any wake restores them
    DISCARDED = "discarded"  # a wake may load them again
    AWAITING_UPDATE = "awaiting_update"  # discarded until an update, which also wakes them


@dataclass(frozen=True, slots=True)
class SleepState:
    """The engine's record of the memory that sleeps, kept even if a worker dies. Each change returns a new value.

    "Awake, but without weights" cannot be expressed.
    """

    weights: WeightsState = WeightsState.AWAKE
    is_cache_awake: bool = True
    fell_asleep_at: int = 0  # level of the last sleep

    @property
    def asleep(self) -> frozenset[Tag]:
        weights = frozenset() if self.weights is WeightsState.AWAKE else frozenset({Tag.WEIGHTS})
        return weights if self.is_cache_awake else weights | {Tag.KV_CACHE}

    @property
    def level(self) -> int | None:
        """The level of the current sleep; None if nothing sleeps."""
        return self.fell_asleep_at if self.asleep else None

    def check_sleep(self, level: int) -> None:
        """Raise TransitionFailed if this level is impossible: discarded weights cannot be kept."""
        if Tag.WEIGHTS in self.asleep and level < self.fell_asleep_at:
            problem = "the weights are discarded; wake it first"
            raise TransitionFailed(f"it sleeps at level {self.fell_asleep_at}: {problem}")

    def sleeps_at(self, level: int) -> bool:
        """Whether everything sleeps at this level already."""
        return self.asleep == ALL_TAGS and self.fell_asleep_at == level

    def slept(self, level: int) -> SleepState:
        """Return the state after a sleep at this level, which cancels the wait for an update."""
        if self.sleeps_at(level) and self.weights is WeightsState.AWAITING_UPDATE:
            return replace(self, weights=WeightsState.DISCARDED)
        if self.sleeps_at(level):
            return self
        weights = WeightsState.KEPT if level == 1 else WeightsState.DISCARDED
        return SleepState(weights, is_cache_awake=False, fell_asleep_at=level)

    def to_wake(self, tags: frozenset[Tag], *, reload: bool) -> frozenset[Tag]:
        """Return the tags that a wake of `tags` restores; without `reload` discarded weights stay asleep."""
        wanted = tags & self.asleep
        return wanted if reload or not self._has_discarded else wanted - {Tag.WEIGHTS}

    def woken(self, tags: frozenset[Tag]) -> SleepState:
        """Return the state after these tags woke."""
        weights = WeightsState.AWAKE if Tag.WEIGHTS in tags else self.weights
        return replace(self, weights=weights, is_cache_awake=self.is_cache_awake or Tag.KV_CACHE in tags)

    def awaiting_update(self) -> SleepState:
        """Return the state after a wake without `reload`, which leaves discarded weights to an update."""
        return replace(self, weights=WeightsState.AWAITING_UPDATE) if self._has_discarded else self

    def updated(self) -> SleepState:
        """Return the state after an update: weights that sleep are loaded by any wake."""
        return self if self.weights is WeightsState.AWAKE else replace(self, weights=WeightsState.KEPT)

    @property
    def _has_discarded(self) -> bool:
        return self.weights in (WeightsState.DISCARDED, WeightsState.AWAITING_UPDATE)


class DesiredWorker(NamedTuple):
    """The worker that the engine wants in its present state."""

    should_run: bool  # a lost or retired worker is replaced now
    asleep: frozenset[Tag]  # tags that are asleep in a worker that starts now
    runs_requests: bool  # suspended requests are resumed

    @property
    def is_indispensable(self) -> bool:
        """Whether the engine cannot work without it, so that its deaths count."""
        return self.should_run and not self.asleep


def desired_worker(stage: PowerStage, asleep: frozenset[Tag], *, in_flight: int) -> DesiredWorker:
    """Return the worker that the engine wants in this stage, while `asleep` sleeps."""
    match stage:
        case PowerStage.FINISHING_TO_SLEEP:
            return DesiredWorker(in_flight > 0, asleep, runs_requests=True)
        case PowerStage.FALLING_ASLEEP:
            return DesiredWorker(False, ALL_TAGS, runs_requests=False)
        case PowerStage.RETIRING:
            return DesiredWorker(True, ALL_TAGS, runs_requests=False)
        case PowerStage.ASLEEP:
            return DesiredWorker(False, asleep, runs_requests=False)
        case PowerStage.WAKING | PowerStage.UPDATING_ASLEEP | PowerStage.UPDATING:
            return DesiredWorker(True, asleep, runs_requests=False)
        case PowerStage.DRAINING:
            return DesiredWorker(in_flight > 0 and not asleep, asleep, runs_requests=not asleep)
        case PowerStage.CLOSED:
            return DesiredWorker(False, asleep, runs_requests=False)
    return DesiredWorker(True, asleep, runs_requests=True)  # nothing sleeps, and requests run
