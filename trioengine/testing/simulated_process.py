"""The process that a simulated worker is: its pipes and its payload socket as memory, its signals, and its end.

It is a `WorkerProcess` as the engine knows it. `exit`, `kill`, `hang`, `close_pipe`, `break_payloads`, `fail_send` and
`say` are the faults of a process, whatever it computes.
"""

from __future__ import annotations

import abc

import trio
from trio.testing import MemoryReceiveStream

from trioengine.testing.behaviour import Health
from trioengine.testing.simulated_payload import PayloadWire, SimulatedMemfd, SimulatedPayload
from trioengine.testing.wire import Wire, WireEnd

SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11
PORTION = 4096  # bytes that a write moves between two checkpoints
PIPE_SIZE = 1 << 20  # bytes that a wire holds before a write blocks
PAYLOAD_QUEUE = 64  # payloads on their way before a send blocks
SMALL_PORTION, SMALL_PIPE = 32, 256  # the same where bytes are moved by hand, so that frames are torn and writes block
SMALL_PAYLOAD_QUEUE = 2


class SimulatedProcess(abc.ABC):
    """What the engine writes arrives as it would by a reader thread.

    With `by_hand` nothing arrives by itself: `receive`, `receive_payloads` and `deliver` are called.
    """

    def __init__(self, pid: int, *, by_hand: bool) -> None:
        self.pid = pid
        self.health = Health.WELL
        self.reaped = False
        self.exit_code = 0
        self.receive_stream = MemoryReceiveStream()
        size = SMALL_PIPE if by_hand else PIPE_SIZE
        self.to_worker = Wire(self._arrive, size, by_hand=by_hand)
        self.to_engine = Wire(self._reach_engine, size, by_hand=by_hand)
        num_payloads = SMALL_PAYLOAD_QUEUE if by_hand else PAYLOAD_QUEUE
        self.payloads = PayloadWire(self._arrive_payload, num_payloads, by_hand=by_hand)
        self.open_payloads: list[SimulatedPayload] = []  # that have come, and are not closed
        portion = SMALL_PORTION if by_hand else PORTION
        self.send_stream: trio.abc.SendStream = WireEnd(self.to_worker, portion, self._broken)
        self._arrived = trio.Event()  # something has, or the process is dead
        self._dead = trio.Event()
        self._stream_ended = False

    @abc.abstractmethod
    def _arrive(self, data: bytes) -> None:
        """Bytes of the engine's."""

    @abc.abstractmethod
    def _arrive_payload(self, payload: int, source: SimulatedPayload) -> None:
        """A payload of the engine's."""

    # ---- WorkerProcess --------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.health is not Health.DEAD

    async def send_payload(self, payload: int, sealed: object) -> None:
        assert isinstance(sealed, SimulatedMemfd), "made by the same ports"
        await self.payloads.send(payload, sealed)

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
        return self.exit_code if self.health is Health.DEAD else None

    # ---- faults ---------------------------------------------------------------------------------------------------

    def exit(self, exit_code: int) -> None:
        """Die, at once; the first exit code stays. What was written still arrives."""
        if self.health is not Health.DEAD:
            self.health = Health.DEAD
            self.exit_code = exit_code
            self._dead.set()
            self._arrived.set()
            self.to_worker.cut()
            self.payloads.cut()
            self._close_payloads()
            if not self.to_engine:
                self.end_stream()

    def end_stream(self) -> None:
        """The engine reads the end of the stream; what is still on its way to it is lost."""
        self.to_engine.cut()
        self._stream_ended = True
        self.receive_stream.put_eof()

    def hang(self) -> None:
        """Stop doing anything, as under SIGSTOP."""
        if self.health is not Health.DEAD:
            self.health = Health.HUNG
            self.to_worker.by_hand = self.payloads.by_hand = True

    def close_pipe(self) -> None:
        """Close the pipe to the engine and live on."""
        if self.health is not Health.DEAD:
            self.hang()
            self.end_stream()

    def break_payloads(self) -> None:
        """The payload socket breaks, and what is on its way over it is lost."""
        self.payloads.cut()

    def fail_send(self) -> None:
        """The next payload cannot be sent, and none after it; what is on its way still arrives."""
        self.payloads.fails_next = True

    def say(self, data: bytes) -> None:
        """Write these bytes, whatever they are."""
        if self.health is not Health.DEAD:
            self.to_engine.put(data)

    # ---- by hand --------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether its reader is alive."""
        return self.health in (Health.WELL, Health.STALLED)

    def receive(self, count: int | None = None) -> None:
        """Let so many bytes from the engine arrive, or all."""
        if self.reads:
            self.to_worker.move(count)

    def receive_payloads(self, count: int | None = None) -> None:
        """Let so many payloads arrive, or all."""
        if self.reads:
            self.payloads.move(count)

    def deliver(self, count: int | None = None) -> None:
        """Let so many bytes arrive at the engine, or all; after a dead worker's last one, the end of the stream."""
        self.to_engine.move(count)
        if self.health is Health.DEAD and not self.to_engine:
            self.end_stream()

    # ---- bytes, and what the kernel does --------------------------------------------------------------------------

    def _broken(self) -> str | None:
        return "the worker is dead" if self.health is Health.DEAD else None

    def _reach_engine(self, data: bytes) -> None:
        if not self._stream_ended:
            self.receive_stream.put_data(data)

    def _close_payloads(self) -> None:
        """As the kernel does at the end of a process."""
        for payload in self.open_payloads:
            if payload.is_open:
                payload.close()
        self.open_payloads.clear()
