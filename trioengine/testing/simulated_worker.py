"""A worker without a process: the real connection, the real scheduling, a toy model, and memory for a pipe.

It is a `WorkerProcess` as the engine knows it. Its methods `kill`, `hang`, `stall` and `say` are the faults. Time is
trio's clock, so that under MockClock nothing waits.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import trio
from trio.testing import MemoryReceiveStream

from trioengine.core.connection import Connection, Role
from trioengine.core.errors import RemoteProtocolError
from trioengine.core.messages import (
    Activity,
    Configure,
    Fatal,
    FatalCode,
    FromWorker,
    Message,
    Ping,
    Pong,
    Ready,
    Shutdown,
    ToWorker,
)
from trioengine.testing.toy_model import VOCAB_SIZE, ToyRunner
from trioengine.worker.scheduling.limits import Limits
from trioengine.worker.scheduling.step_loop import StepLoop

SIGTERM, SIGKILL = 15, 9
CHUNK = 4096  # bytes that a write moves between two checkpoints


@dataclass(frozen=True)
class Behaviour:
    """How one incarnation behaves; times in seconds."""

    load_time: float = 0.5
    step_time: float = 0.01
    fatal: Fatal | None = None  # said instead of READY


class Health(enum.Enum):
    """What a simulated worker does with its time."""

    WELL = "well"
    STALLED = "stalled"  # the step in progress never ends; its reader still answers
    HUNG = "hung"  # nothing at all happens, as under SIGSTOP
    DEAD = "dead"


class SimulatedWorker:
    """One incarnation. `run` is its main thread; what the engine writes arrives as it would by a reader thread."""

    def __init__(self, pid: int, limits: Limits, behaviour: Behaviour) -> None:
        self.pid = pid
        self.runner = ToyRunner(limits.block_size)
        self.step_loop = StepLoop(self.runner, limits, trio.current_time)
        self.connection = Connection(Role.WORKER)
        self.send_stream: trio.abc.SendStream = _Inbox(self)
        self.receive_stream = MemoryReceiveStream()
        self.health = Health.WELL
        self.received: list[Message] = []  # everything the engine said, in order
        self.reaped = False
        self._limits = limits
        self._behaviour = behaviour
        self._queue: deque[ToWorker] = deque()
        self._arrived = trio.Event()
        self._dead = trio.Event()
        self._exit_code = 0
        self._activity, self._since, self._progress = Activity.STARTING, trio.current_time(), 0

    # ---- WorkerProcess --------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        await self._dead.wait()

    def terminate(self) -> None:
        if self.health is not Health.HUNG:
            self.exit(-SIGTERM)

    def kill(self) -> None:
        self.exit(-SIGKILL)

    def reap(self) -> int | None:
        self.kill()
        self.reaped = True
        return self._exit_code if self.health is Health.DEAD else None

    # ---- faults ---------------------------------------------------------------------------------------------------

    def exit(self, exit_code: int) -> None:
        """Die, at once; the first exit code stays."""
        if self.health is not Health.DEAD:
            self.health = Health.DEAD
            self._exit_code = exit_code
            self._dead.set()
            self.receive_stream.put_eof()
            self._arrived.set()

    def hang(self) -> None:
        """Stop doing anything, as under SIGSTOP."""
        if self.health is not Health.DEAD:
            self.health = Health.HUNG

    def stall(self) -> None:
        """Never end a step again; PING is still answered."""
        if self.health is Health.WELL:
            self.health = Health.STALLED
            self._turn_to(Activity.STEPPING)

    def close_pipe(self) -> None:
        """Close the pipe to the engine and live on."""
        if self.health is not Health.DEAD:
            self.health = Health.HUNG
            self.receive_stream.put_eof()

    def say(self, data: bytes) -> None:
        """Write these bytes, whatever they are."""
        if self.health is not Health.DEAD:
            self.receive_stream.put_data(data)

    # ---- the worker's work ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load, then step and answer until dead."""
        while self.health is Health.WELL:
            if self._queue or self.step_loop.has_work:
                await self._turn()
            else:
                self._turn_to(Activity.IDLE)
                await self._arrived.wait()
                self._arrived = trio.Event()

    async def _turn(self) -> None:
        while self._queue and self.health is Health.WELL:
            await self._handle(self._queue.popleft())
        if self.step_loop.has_work and self.health is Health.WELL:
            self._turn_to(Activity.STEPPING)
            await trio.sleep(self._behaviour.step_time)
            if self.health is Health.WELL:
                self._send_all(self.step_loop.step())
        if not self.step_loop.has_work:
            self.step_loop.check_integrity()

    async def _handle(self, message: ToWorker) -> None:
        self._progress += 1
        if isinstance(message, Configure):
            self._turn_to(Activity.LOADING)
            await trio.sleep(self._behaviour.load_time)
            if self._behaviour.fatal is not None:
                self._send_all([self._behaviour.fatal])
                self.exit(1)
            else:
                self._send_all([self._ready()])
        elif isinstance(message, Shutdown):
            self.exit(0)
        else:
            self._send_all(self.step_loop.handle(message))

    def _ready(self) -> Ready:
        limits = self._limits
        return Ready(
            model_type="toy",
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=limits.max_sequence_len,
            kv_blocks_total=limits.kv_blocks_total,
            block_size=limits.block_size,
        )

    def _send_all(self, messages: list[FromWorker]) -> None:
        for message in messages:
            if self.health in (Health.WELL, Health.STALLED):
                self.receive_stream.put_data(self.connection.send(message))

    def _turn_to(self, activity: Activity) -> None:
        if activity is not self._activity:
            self._activity, self._since = activity, trio.current_time()

    def receive(self, data: bytes) -> None:
        """The reader thread's part: decode, answer PING, queue the rest."""
        self.connection.receive_data(data)
        try:
            while (message := self.connection.next_message()) is not None:
                self.received.append(message)
                if isinstance(message, Ping):
                    self._pong(message)
                else:
                    self._queue.append(message)  # type: ignore[arg-type]
        except RemoteProtocolError as exc:
            self._send_all([Fatal(FatalCode.INTERNAL, str(exc), "")])
            self.exit(1)
        self._arrived.set()

    def _pong(self, message: Ping) -> None:
        seconds = trio.current_time() - self._since
        self._send_all([Pong(message.ping, self._progress, self._activity, seconds)])


class _Inbox(trio.abc.SendStream):
    """The engine's end of the pipe to a simulated worker: a write moves in portions, like one to a pipe that fills."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            await trio.lowlevel.checkpoint()
            if self._worker.health is Health.DEAD:
                raise trio.BrokenResourceError("the worker is dead")
            if self._worker.health is Health.HUNG:
                await trio.sleep_forever()
            self._worker.receive(bytes(data[start : start + CHUNK]))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
