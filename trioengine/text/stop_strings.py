"""Strings that a text may end with in part while it comes in pieces: stop strings, and tags."""

from __future__ import annotations


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that begins the tag, and is not the whole tag."""
    return next((count for count in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:count])), 0)


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces; holds back only text that could begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> tuple[str, bool]:
        """Return the text that is certain, and whether a stop string is complete: then the text ends right before it.

        The stop string that is complete first wins, and among stop strings that end together the longest.
        """
        text, seen = self._held + piece, len(self._held)  # an end within the seen part was ignored
        places = [(stop, text.find(stop, max(0, seen + 1 - len(stop)))) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for stop, at in places if at >= 0]
        if ends:
            self._held = ""
            _, at, self.found = min(ends)
            return text[:at], True
        return self.ignore(piece), False

    def ignore(self, piece: str) -> str:
        """Return the text that is certain, where stop strings may begin in this piece but not end in it."""
        text = self._held + piece
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that is held back, after the last piece."""
        held, self._held = self._held, ""
        return held
