"""What the books of an engine must say in the end, by what its callers were told: every request, every refusal.

Each method that watches is a `mutate` for `Machine._watch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError
from trioengine.core.types import Cause, FinishReason


class Accounts:
    """Those of one engine. `admitted` are the ids of the requests that got a slot, whoever notes them."""

    def __init__(self, admitted: AbstractSet[int]) -> None:
        self.generations: list[Generation] = []
        self._by_task: dict[trio.lowlevel.Task, Generation] = {}
        self._admitted = admitted
        self._rejected = 0

    def latest_of(self, task: trio.lowlevel.Task | None) -> Generation | None:
        """The last request that a task has made."""
        return None if task is None else self._by_task.get(task)

    def of_requests(self, init: Any) -> Any:
        """For `Generation.__init__`: all that there are, and whose they are."""

        def watched(generation: Generation, *args: Any, **more: Any) -> None:
            init(generation, *args, **more)
            self.generations.append(generation)
            self._by_task[trio.lowlevel.current_task()] = generation

        return watched

    def of_openings(self, aenter: Any) -> Any:
        """For `Session.__aenter__`: a session that is refused, ended or cancelled while it is entered is counted."""

        async def watched(session: Session) -> Any:
            try:
                return await aenter(session)
            except (EngineError, trio.Cancelled):
                self._rejected += 1
                raise

        return watched

    def of_starts(self, start: Any) -> Any:
        """For `Session.start`: so is a request that is refused; all others have an outcome."""

        async def watched(session: Session, generation: Generation) -> None:
            try:
                await start(session, generation)
            except EngineError:
                self._rejected += generation.outcome is None
                raise

        return watched

    def check(self, engine: Engine) -> None:
        """Everybody has left: every request, every cause and every refusal is in the books, once."""
        admitted = [generation for generation in self.generations if generation._request_id in self._admitted]
        undecided = [generation for generation in admitted if generation.outcome is None]
        assert not undecided, f"they had a slot, and have no outcome: {undecided}"
        outcomes = [generation.outcome for generation in self.generations if generation.outcome is not None]
        reasons = Counter(outcome.finish_reason for outcome in outcomes)
        causes = Counter(outcome.cause for outcome in outcomes if outcome.cause is not None)
        statistics = engine.statistics()
        for name, due, found in (
            ("received", len(outcomes), statistics.received),
            ("finish_reasons", {reason: reasons[reason] for reason in FinishReason}, statistics.finish_reasons),
            ("abort_causes", {cause: causes[cause] for cause in Cause}, statistics.abort_causes),
            ("rejected", self._rejected, statistics.rejected),
        ):
            assert found == due, f"the books say of {name} {found}, the callers were told {due}"

    @property
    def num_shut_down(self) -> int:
        """Requests that were aborted because the engine ends."""
        outcomes = (generation.outcome for generation in self.generations)
        return sum(outcome is not None and outcome.cause is Cause.SHUTDOWN for outcome in outcomes)
