"""Stop strings in a text that comes in pieces."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string, also across pieces, and holds back only what could become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """The text that is certain, and whether a stop string is complete: then that text ends right before it.

        The stop that is complete first wins, and of those that end together the one that began first.
        """
        text, seen = self._held + piece, len(self._held)  # what ends in the part that is seen was passed over
        places = [(stop, text.find(stop, max(0, seen + 1 - len(stop)))) for stop in self._stops]
        ends = [(at + len(stop), at) for stop, at in places if at >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        return self.pass_over(piece), False

    def pass_over(self, piece: str) -> str:
        """The text that is certain, where a stop string may begin in this piece, but none that ends in it counts."""
        text = self._held + piece
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more pieces come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
