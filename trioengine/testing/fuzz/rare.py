"""Rare states: what a fuzzer that does its work reaches sometimes. One that is no longer reached is a finding, too."""

from __future__ import annotations

from collections import Counter


class Rare:
    """Counts how often each named state was reached."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def saw(self, state: str) -> None:
        self.counts[state] += 1
