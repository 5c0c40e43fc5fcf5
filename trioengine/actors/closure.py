"""The time in which a sleep or an update keeps the gate closed: what was refused then, in one line of the log."""

from __future__ import annotations

import logging

from trioengine.core.ledger import Ledger

logger = logging.getLogger("trioengine")


class Closure:
    """Counts the refusals of one engine between `begin` and `end`; each is harmless when repeated."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rejected_before: int | None = None  # None: the gate is open

    def begin(self) -> None:
        if self._rejected_before is None:
            self._rejected_before = self._ledger.rejected

    def end(self) -> None:
        """Log how many sessions and requests were refused, if any were."""
        if self._rejected_before is None:
            return
        refused = self._ledger.rejected - self._rejected_before
        self._rejected_before = None
        if refused:
            logger.info("sessions and requests refused while the engine slept or was updated: %d", refused)
