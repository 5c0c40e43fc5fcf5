"""Sessions of an engine core under random events, each with a mirror: the base of the machines beside this file."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from trioengine.core.messages import AddSession
from trioengine.worker.scheduling.engine_core import EngineCore


class SessionMachine(RuleBasedStateMachine):
    """A mirror has a `request`, which is None while its session is idle."""

    max_sessions = 8
    core: EngineCore
    mirrors: dict[int, Any]  # by session
    last_session: int

    @property
    def idle(self) -> list[int]:
        return [session for session, mirror in self.mirrors.items() if mirror.request is None]

    @property
    def busy(self) -> list[int]:
        return [session for session, mirror in self.mirrors.items() if mirror.request is not None]

    @property
    def has_room(self) -> bool:
        return len(self.mirrors) < self.max_sessions

    def draw_session(self, data: st.DataObject, mirror: Any, *, fresh: bool) -> int:
        """An idle session, or a new one, of which this is the mirror."""
        if self.idle and not (fresh and self.has_room):
            return data.draw(st.sampled_from(self.idle))
        self.last_session += 1
        assert self.core.handle(AddSession(self.last_session)) == []
        self.mirrors[self.last_session] = mirror
        return self.last_session
