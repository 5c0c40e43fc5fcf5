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
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineError, EngineOverloaded, TimedOut
from trioengine.core.messages import FinishReason
from trioengine.core.outcome import Cause


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
        """For `Session.__aenter__`: who is refused a session is counted."""

        async def watched(session: Session) -> Any:
            try:
                return await aenter(session)
            except (EngineOverloaded, EngineAsleep, EngineClosed, TimedOut):
                self._rejected += 1
                raise

        return watched

    def of_starts(self, start: Any) -> Any:
        """For `Session.start`: so is who is refused a request slot; what fails with a slot has an outcome."""

        async def watched(session: Session, generation: Generation) -> None:
            try:
                await start(session, generation)
            except EngineError:
                self._rejected += generation._request_id not in self._admitted
                raise

        return watched

    def check(self, engine: Engine) -> None:
        """Everybody has left: every request that was admitted, every cause and every refusal is in the books, once."""
        admitted = [generation for generation in self.generations if generation._request_id in self._admitted]
        outcomes = [generation.outcome for generation in admitted]
        reasons = Counter(outcome.finish_reason for outcome in outcomes if outcome is not None)
        causes = Counter(outcome.cause for outcome in outcomes if outcome is not None and outcome.cause is not None)
        statistics = engine.statistics()
        for name, due, found in (
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
