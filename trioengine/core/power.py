"""Sleep state of the engine's memory, and the worker that each power state needs."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from trioengine.core.errors import TransitionFailed
from trioengine.core.lifecycle import Power


class Tag(enum.StrEnum):
    """A part of the worker's memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


TagName: TypeAlias = Literal["weights", "kv_cache"] | Tag
ALL_TAGS = frozenset(Tag)


def sorted_tags(tags: Iterable[Tag]) -> tuple[Tag, ...]:
    """By their names, as they are said on the wire."""
    return tuple(sorted(tags, key=lambda tag: tag.value))


class WeightsState(enum.Enum):
    """Where the weights are."""

    AWAKE = "awake"
    KEPT = "kept"  # not discarded, or updated while they slept: any wake brings them back
    DISCARDED = "discarded"  # a wake may load them again
    AWAITING_UPDATE = "awaiting_update"  # discarded, and left so until an update, which wakes them


@dataclass(frozen=True, slots=True)
class SleepState:
    """A value: each change gives another. "Awake, but without weights" cannot be said."""

    weights: WeightsState = WeightsState.AWAKE
    is_cache_awake: bool = True
    fell_asleep_at: int = 0  # the level of the last sleep

    @property
    def asleep(self) -> frozenset[Tag]:
        weights = frozenset() if self.weights is WeightsState.AWAKE else frozenset({Tag.WEIGHTS})
        return weights if self.is_cache_awake else weights | {Tag.KV_CACHE}

    @property
    def level(self) -> int | None:
        """None: nothing sleeps."""
        return self.fell_asleep_at if self.asleep else None

    def check_sleep(self, level: int) -> None:
        """Raise TransitionFailed where this level cannot be had: what is discarded is not kept."""
        if Tag.WEIGHTS in self.asleep and level < self.fell_asleep_at:
            raise TransitionFailed(
                f"it sleeps at level {self.fell_asleep_at}: the weights are discarded; wake it first"
            )

    def sleeps_at(self, level: int) -> bool:
        """Whether a sleep to this level has nothing to do."""
        return self.asleep == ALL_TAGS and self.fell_asleep_at == level

    def slept(self, level: int) -> SleepState:
        """All of it sleeps; an update is awaited no more."""
        if self.sleeps_at(level):
            return (
                replace(self, weights=WeightsState.DISCARDED) if self.weights is WeightsState.AWAITING_UPDATE else self
            )
        weights = WeightsState.KEPT if level == 1 else WeightsState.DISCARDED
        return SleepState(weights, is_cache_awake=False, fell_asleep_at=level)

    def to_wake(self, tags: frozenset[Tag], *, reload: bool) -> frozenset[Tag]:
        """What a wake of these tags brings back."""
        wanted = tags & self.asleep
        return wanted if reload or not self._has_discarded else wanted - {Tag.WEIGHTS}

    def woken(self, tags: frozenset[Tag]) -> SleepState:
        """These are back."""
        weights = WeightsState.AWAKE if Tag.WEIGHTS in tags else self.weights
        return replace(self, weights=weights, is_cache_awake=self.is_cache_awake or Tag.KV_CACHE in tags)

    def awaiting_update(self) -> SleepState:
        """A wake was to leave discarded weights asleep."""
        return replace(self, weights=WeightsState.AWAITING_UPDATE) if self._has_discarded else self

    def updated(self) -> SleepState:
        """There are other weights: those that sleep are loaded by any wake."""
        return self if self.weights is WeightsState.AWAKE else replace(self, weights=WeightsState.KEPT)

    @property
    def _has_discarded(self) -> bool:
        return self.weights in (WeightsState.DISCARDED, WeightsState.AWAITING_UPDATE)


class DesiredWorker(NamedTuple):
    """At one moment."""

    should_run: bool  # one that was lost, or has retired, is replaced now
    asleep: frozenset[Tag]  # what of one that starts now is to sleep
    runs_requests: bool  # where there is one, what is suspended goes on

    @property
    def is_indispensable(self) -> bool:
        """Whether the engine is of no use without one: its deaths count."""
        return self.should_run and not self.asleep


def desired_worker(
    power: Power, asleep: frozenset[Tag], *, in_flight: int, is_finishing: bool, is_changing: bool
) -> DesiredWorker:
    """In this state, while `asleep` sleeps.

    `is_finishing`: requests in flight may still finish before a sleep or an update; `is_changing`: a change that is
    made asleep, or the sleep that a worker retires for, waits for a worker.
    """
    match power:
        case Power.FALLING_ASLEEP if is_finishing:
            return DesiredWorker(in_flight > 0, asleep, runs_requests=True)
        case Power.FALLING_ASLEEP:
            return DesiredWorker(is_changing, ALL_TAGS, runs_requests=False)
        case Power.ASLEEP:
            return DesiredWorker(is_changing, asleep, runs_requests=False)
        case Power.WAKING:
            return DesiredWorker(True, asleep, runs_requests=False)
        case Power.UPDATING:
            return DesiredWorker(True, asleep, runs_requests=is_finishing)
        case Power.DRAINING:
            return DesiredWorker(in_flight > 0 and not asleep, asleep, runs_requests=not asleep)
        case Power.CLOSED:
            return DesiredWorker(False, asleep, runs_requests=False)
    return DesiredWorker(True, asleep, runs_requests=True)  # LOADING, AWAKE, RESTARTING: nothing sleeps
