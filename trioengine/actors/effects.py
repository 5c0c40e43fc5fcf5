"""Effects: the consequences of a transition for the rest of the engine, carried out after it, in one loop.

A session or a gate never calls another one. Its transition changes its own state and the ledger, and adds effects; the
stimulus that caused the transition (a call of a user, a message of the worker, a death, a deadline) then calls `drain`.
Carrying out an effect may cause further transitions, whose effects join the end of the queue. So no transition runs
inside another one, effects keep the order of the queue, and nothing is left to do when a stimulus returns.

A bug in the transition of a session ends that session alone (`SessionActor.attempt`). A bug in an effect ends the
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Effects(deque[object]):
    """The queue of effects of one engine, and the loop that carries them out. Synchronous; the step of the stimulus."""

    __slots__ = ("_carry_out", "_is_draining")

    def __init__(self, carry_out: Callable[[object], None]) -> None:
        """`carry_out` handles one effect; an exception in it leaves `drain`."""
        super().__init__()
        self._carry_out = carry_out
        self._is_draining = False

    def drain(self) -> None:
        """Carry out every effect, those that arise meanwhile included; nothing if that is going on already."""
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self:
                self._carry_out(self.popleft())
        finally:
            self._is_draining = False
