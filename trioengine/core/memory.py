"""What sleeps of a worker's memory, and what brings it back: the engine's own record, whatever becomes of a worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from trioengine.core.errors import TransitionFailed
from trioengine.core.tag import ALL_TAGS, Tag


class WeightsState(enum.Enum):
    """Where the weights are."""

    AWAKE = "awake"
    KEPT = "kept"  # not discarded, or updated while they slept: any wake brings them back
    DISCARDED = "discarded"  # a wake may load them again
    AWAITED = "awaited"  # discarded, and left so until an update, which wakes them


@dataclass(frozen=True, slots=True)
class Memory:
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

    def slept(self, level: int) -> Memory:
        """All of it sleeps; an update is awaited no more."""
        if self.sleeps_at(level):
            return replace(self, weights=WeightsState.DISCARDED) if self.weights is WeightsState.AWAITED else self
        weights = WeightsState.KEPT if level == 1 else WeightsState.DISCARDED
        return Memory(weights, is_cache_awake=False, fell_asleep_at=level)

    def to_wake(self, tags: frozenset[Tag], *, reload: bool) -> frozenset[Tag]:
        """What a wake of these tags brings back."""
        wanted = tags & self.asleep
        return wanted if reload or not self._has_discarded else wanted - {Tag.WEIGHTS}

    def woken(self, tags: frozenset[Tag]) -> Memory:
        """These are back."""
        weights = WeightsState.AWAKE if Tag.WEIGHTS in tags else self.weights
        return replace(self, weights=weights, is_cache_awake=self.is_cache_awake or Tag.KV_CACHE in tags)

    def awaiting(self) -> Memory:
        """A wake was to leave discarded weights asleep."""
        return replace(self, weights=WeightsState.AWAITED) if self._has_discarded else self

    def updated(self) -> Memory:
        """There are other weights: those that sleep are loaded by any wake."""
        return self if self.weights is WeightsState.AWAKE else replace(self, weights=WeightsState.KEPT)

    @property
    def _has_discarded(self) -> bool:
        return self.weights in (WeightsState.DISCARDED, WeightsState.AWAITED)
