"""Bounds in simulated time, in seconds, of everything that the documentation promises to end.

Time counts while the world is attended: each byte has moved, each task has run, and the clock stops at each deadline. A
jump over deadlines, or with bytes on their way, delays things that the engine cannot hurry: counting begins anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.testing.fuzz import inside
from trioengine.testing.simulated_worker import Health, SimulatedWorker

ROUNDING = 1e-6  # seconds


class Wait(NamedTuple):
    """Something that has to be over within so many seconds; `key` is the same as long as it is the same wait."""

    key: Hashable
    seconds: float
    name: str


class Bounds:
    """The waits at present, and since when each is attended."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}

    def interrupt(self) -> None:
        """Time has passed, and the world was not attended."""
        self._since.clear()

    def too_long(self, now: float, seconds: float, waits: Iterable[Wait]) -> str | None:
        """Nothing can run or move for so many seconds: a complaint, if that is too long for one of the waits.

        It is looked for beforehand, because a wait that ends too late is over afterwards.
        """
        complaint = None
        before, self._since = self._since, {}
        for wait in waits:
            began = self._since[wait.key] = before.get(wait.key, now)
            takes = now + seconds - began
            if complaint is None and takes > wait.seconds + ROUNDING:
                complaint = f"{wait.name} for {takes:g} s, and must not for {wait.seconds:g} s"
        return complaint


def waits_of(engine: Engine, worker: SimulatedWorker | None, *, is_closing: bool, is_over: bool) -> Iterator[Wait]:
    """The waits of an engine for its worker; `is_closing`: it has to end; `is_over`: it has ended."""
    config = engine.config
    if is_closing and not is_over:
        is_ill = worker is not None and worker.health in (Health.HUNG, Health.STALLED)
        bound = config.worker_shutdown_timeout if is_ill else inside.LAST_FRAMES_TIMEOUT
        yield Wait("end", bound, "the engine was closed, and goes on")
    if worker is not None:
        yield from _waits_for(engine, worker)
    elif inside.power(engine) is Power.RESTARTING:
        key = "restart", inside.num_incarnations(engine)
        yield Wait(key, max(config.restart_delays), "the engine has no worker, and starts none")


def _waits_for(engine: Engine, worker: SimulatedWorker) -> Iterator[Wait]:
    """By its health: a worker that does not answer, or makes no progress, is killed, and a dead one is reaped."""
    config, key = engine.config, (worker.pid, worker.health)
    match worker.health:
        case Health.DEAD:
            yield Wait(key, inside.LAST_FRAMES_TIMEOUT, "the worker is dead, and is not reaped")
        case Health.HUNG:
            seconds = config.unresponsive_timeout + config.ping_interval
            yield Wait(key, seconds, "the worker does not answer, and is not killed")
        case Health.STALLED:
            timeout = config.startup_timeout if worker.is_starting else config.step_timeout
            yield Wait(key, timeout + config.ping_interval, "the worker makes no progress, and is not killed")
