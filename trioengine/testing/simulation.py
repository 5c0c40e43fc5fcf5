"""The real engine over simulated ports: no process, no thread, no wall clock."""

from __future__ import annotations

import enum
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.opening import open_engine
from trioengine.actors.ports import Ports, WorkerProcess
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.config import EngineConfig
from trioengine.core.errors import WorkerLost
from trioengine.core.image import BytesLike
from trioengine.hub.model_info import ModelInfo
from trioengine.testing.simulated_process import SimulatedMemfd
from trioengine.testing.simulated_worker import Behaviour, SimulatedWorker, WorkerObserver
from trioengine.testing.toy_model import TOY_TILE, VOCAB_SIZE, check_toy_adapter, read_toy_model
from trioengine.worker.scheduling.sequence import Limits

DEFAULT_LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    max_model_len=512,
    kv_blocks_total=256,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
IMAGE_LIMITS = replace(DEFAULT_LIMITS, vocab_size=VOCAB_SIZE + 1, tile=TOY_TILE)  # of a toy that takes images


class SealFailure(enum.Enum):
    """Where the system fails to seal bytes, and its errno."""

    CREATE = errno.EMFILE  # before anything is read
    WRITE = errno.ENOMEM  # after bytes were read


class Simulation:
    """The outside world of one engine: its workers, one an incarnation, run in `nursery`, or are moved by hand.

    `behaviours` belong to the incarnations in turn; the last one stays. `thread_passes` is how many scheduler
    passes a call in a thread takes, where prompts longer than `thread_threshold` are prepared. The next
    `failing_starts` workers cannot be started; the next `stalled_starts` are, and never say READY. The next bytes that
    are sealed fail by the first of `failing_seals`.
    """

    def __init__(
        self,
        nursery: trio.Nursery | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        behaviours: Iterable[Behaviour] = (Behaviour(),),
        thread_passes: int = 1,
        thread_threshold: int = Ports.thread_threshold,
    ) -> None:
        self.limits = limits
        self.workers: list[SimulatedWorker] = []
        self.thread_passes = thread_passes
        self.failing_starts = 0
        self.max_payloads = 64  # descriptors
        self.stalled_starts = 0
        self.failing_seals: list[SealFailure] = []
        self.num_failed_seals = 0
        self.observers: list[WorkerObserver] = []  # of all workers
        self.prints_tools = False  # the chat template
        self.tool_form = "hermes"  # of the model
        self.unpreparable: str | None = None  # prompts that contain this text cannot be tokenized
        self.poisoned: dict[int, int] = {}  # requests that kill each worker, and how many tokens they get before
        self._thread_threshold = thread_threshold
        self._nursery = nursery
        self._behaviours = list(behaviours)
        self._seeds = itertools.count(1)
        self._memfds: list[SimulatedMemfd] = []

    @property
    def worker(self) -> SimulatedWorker:
        """The latest incarnation."""
        return self.workers[-1]

    @property
    def ports(self) -> Ports:
        """The ports for Engine or open_engine."""
        return Ports(
            spawn_worker=self._spawn_worker,
            run_in_thread=self._run_in_thread,
            find_model=self._find_model,
            finish_in_thread=self._finish_in_thread,
            read_model=self._read_model,
            check_adapter=check_toy_adapter,
            mint_seed=partial(next, self._seeds),
            mint_secret=lambda: b"secret",
            seal=self._seal,
            max_payloads=lambda: self.max_payloads,
            thread_threshold=self._thread_threshold,
        )

    async def _spawn_worker(self) -> WorkerProcess:
        if self.failing_starts:
            self.failing_starts -= 1
            raise WorkerLost("made not to start")
        incarnation = len(self.workers)
        behaviour = self._behaviours[min(incarnation, len(self._behaviours) - 1)]
        worker = SimulatedWorker(
            1001 + incarnation, self.limits, behaviour, by_hand=self._nursery is None, observers=self.observers
        )
        worker.runner.poisoned = self.poisoned
        self.workers.append(worker)
        if self.stalled_starts:
            self.stalled_starts -= 1
            worker.stall()
        if self._nursery is not None:
            self._nursery.start_soon(worker.run, name=f"simulated worker {worker.pid}")
        return worker

    async def _run_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        for _ in range(self.thread_passes):
            await trio.lowlevel.checkpoint()
        return function(*args)

    async def _finish_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """As a thread that cannot be cancelled once it has begun."""
        await trio.lowlevel.checkpoint_if_cancelled()
        for _ in range(self.thread_passes):
            await trio.lowlevel.cancel_shielded_checkpoint()
        return function(*args)

    def _read_model(self, path: Path) -> ModelInfo:
        images = self.limits.tile is not None
        return read_toy_model(
            path,
            self.limits.max_model_len,
            images=images,
            embeds=self.limits.embeds,
            prints_tools=self.prints_tools,
            tool_form=self.tool_form,
            unpreparable=self.unpreparable,
        )

    def _seal(self, chunks: Iterable[BytesLike]) -> SimulatedMemfd:
        if self.failing_seals:
            self._fail_seal(self.failing_seals.pop(0), chunks)
        sealed = SimulatedMemfd(chunks)
        self._memfds = [*(memfd for memfd in self._memfds if memfd.is_open or memfd.num_passed), sealed]
        return sealed

    def _fail_seal(self, failure: SealFailure, chunks: Iterable[BytesLike]) -> NoReturn:
        self.num_failed_seals += 1
        if failure is SealFailure.WRITE:
            next(iter(chunks))
        raise OSError(failure.value, os.strerror(failure.value))

    @property
    def memfds(self) -> list[SimulatedMemfd]:
        """The sealed bytes that the engine has open."""
        return [memfd for memfd in self._memfds if memfd.is_open]

    @property
    def num_descriptors_passed(self) -> int:
        """Descriptors of sealed bytes that the engine has passed to workers, and that are open."""
        return sum(memfd.num_passed for memfd in self._memfds)

    async def _find_model(self, model: str, progress: Callable[[int, int], None] | None) -> Path:
        await trio.lowlevel.checkpoint()
        return Path(model)


@asynccontextmanager
async def simulated_engine(
    config: EngineConfig | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    behaviours: Iterable[Behaviour] = (Behaviour(),),
    thread_passes: int = 1,
    thread_threshold: int = Ports.thread_threshold,
) -> AsyncIterator[tuple[Engine, Simulation]]:
    """An engine that is ready, over a simulated worker. Use MockClock: a step takes simulated time."""
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(
            nursery,
            limits=limits,
            behaviours=behaviours,
            thread_passes=thread_passes,
            thread_threshold=thread_threshold,
        )
        config = EngineConfig(model="toy", max_num_seqs=limits.max_num_seqs) if config is None else config
        async with open_engine(config, ports=simulation.ports) as engine:
            yield engine, simulation
