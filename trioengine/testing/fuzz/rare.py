"""Rare states: what a fuzzer that does its work reaches sometimes. One that is no longer reached is a finding, too.

Every transition of the lifecycle tables that is taken is one of them, by its name; the machine adds others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from trioengine.core.lifecycle import (
    POWER_TRANSITIONS,
    SESSION_TRANSITIONS,
    Attachment,
    Event,
    Phase,
    Power,
    PowerEvent,
    SessionLifecycle,
)


class Rare:
    """Counts how often each state was reached. The methods `of_…` watch the lifecycle tables."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def saw(self, state: str) -> None:
        """A state was reached."""
        self.counts[state] += 1

    def of_sessions(self, apply: Any) -> Any:
        """For `SessionLifecycle.apply`."""
        counts = self.counts

        def watched(lifecycle: SessionLifecycle, event: Event) -> Any:
            state = session_state(lifecycle.phase, lifecycle.attachment, event)
            actions = apply(lifecycle, event)
            counts[state] += 1
            return actions

        return watched

    def of_power(self, next_power: Any) -> Any:
        """For `gate.next_power`."""

        def watched(power: Power, event: PowerEvent) -> Any:
            following = next_power(power, event)
            self.saw(power_state(power, event))
            return following

        return watched


def session_state(phase: Phase, attachment: Attachment, event: Event) -> str:
    """The name of a transition of a session."""
    return _SESSION_STATES[phase, attachment, event]


def power_state(power: Power, event: PowerEvent) -> str:
    """The name of a transition of the engine."""
    return f"engine {power.value}: {event.value}"


_SESSION_STATES = {
    (phase, attachment, event): f"session {phase.value}, {attachment.value}: {event.value}"
    for phase in Phase
    for attachment in Attachment
    for event in Event
}

TABLE_STATES = frozenset(_SESSION_STATES[key] for key in SESSION_TRANSITIONS) | frozenset(
    power_state(power, event) for power, row in POWER_TRANSITIONS.items() for event in row
)
