"""The process that a simulated worker is: pipes and payload socket in memory, signals, faults and its end."""

from __future__ import annotations

import abc
import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio
from trio.testing import MemoryReceiveStream

from trioengine.core.messages import Fatal
from trioengine.testing.toy_grammar import toy_compile
from trioengine.worker.scheduling.grammars import GrammarCompiled, compile_for
from trioengine.worker.scheduling.image_queue import PictureDecoded, decode_picture
from trioengine.worker.scheduling.images import Decode, Picture
from trioengine.worker.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Behaviour:
    """How one incarnation behaves; times in seconds."""

    load_time: float = 0.5
    load_bytes: int = 0  # reported by LOADING, half of them in half of that time
    step_time: float = 0.01
    decode_time: float = 0.02  # of an image or a grammar; no longer than a step where there is one
    fatal: Fatal | None = None  # sent instead of READY


class Health(enum.Enum):
    """The behaviour of a simulated worker."""

    WELL = "well"
    STALLED = "stalled"  # the step in progress never ends; its reader still answers
    HUNG = "hung"  # nothing at all happens, as under SIGSTOP
    DEAD = "dead"


class Wire:
    """Bytes arrive at once, or when they are moved; so many of them fit before a write blocks."""

    def __init__(self, arrive: Callable[[bytes], None], size: int, *, by_hand: bool) -> None:
        self.by_hand = by_hand
        self._arrive = arrive
        self._size = size
        self._bytes = bytearray()
        self._moved = trio.Event()

    def __len__(self) -> int:
        return len(self._bytes)

    def __bytes__(self) -> bytes:
        return bytes(self._bytes)

    def put(self, data: bytes) -> None:
        """Write, whatever the wire holds."""
        self._bytes += data
        if not self.by_hand:
            self.move()

    async def room(self) -> None:
        """Wait until a write would not block."""
        while len(self._bytes) >= self._size:
            self._moved = trio.Event()
            await self._moved.wait()

    def move(self, count: int | None = None) -> None:
        """Let so many bytes arrive, or all."""
        if self._bytes and count != 0:
            data = bytes(self._bytes[:count])
            del self._bytes[:count]
            self._moved.set()
            self._arrive(data)

    def cut(self) -> None:
        """Lose the bytes that are on their way."""
        self._bytes.clear()
        self._moved.set()


class WireEnd(trio.abc.SendStream):
    """The end that is written to, in portions, like a pipe that fills.

    Raises BrokenResourceError with `broken()` as its message, unless that is None.
    """

    def __init__(self, wire: Wire, portion: int, broken: Callable[[], str | None]) -> None:
        self._wire = wire
        self._portion = portion
        self._broken = broken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), self._portion):
            await trio.lowlevel.checkpoint()
            await self._wire.room()
            if (reason := self._broken()) is not None:
                raise trio.BrokenResourceError(reason)
            self._wire.put(bytes(data[start : start + self._portion]))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class SimulatedPayload:
    """A descriptor in the worker, or on its way there: a PayloadSource."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self.is_open = True
        self._data = data

    @contextmanager
    def open(self) -> Iterator[memoryview]:
        assert self.is_open, "a payload is read that is closed"
        yield memoryview(self._data)
        assert self.is_open, "a payload is closed while it is read"

    def close(self) -> None:
        assert self.is_open, "a payload is closed twice"
        self.is_open = False


class SimulatedMemfd:
    """Sealed bytes as the engine has them, and their descriptors elsewhere."""

    def __init__(self, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        self.data = b"".join(chunks)
        self.num_bytes = len(self.data)
        self.is_open = True
        self.passed: list[SimulatedPayload] = []  # and not closed, when it was last passed on

    def close(self) -> None:
        assert self.is_open, "sealed bytes are given back twice"
        self.is_open = False

    @property
    def num_passed(self) -> int:
        """Descriptors that were passed on, and are open."""
        return sum(payload.is_open for payload in self.passed)

    def pass_on(self) -> SimulatedPayload:
        """One more descriptor."""
        assert self.is_open, "bytes are passed on that were given back"
        payload = SimulatedPayload(self.data)
        self.passed = [*(payload for payload in self.passed if payload.is_open), payload]
        return payload


class PayloadWire:
    """Payloads on their way: they arrive at once, or when they are moved; so many of them fit before a send blocks."""

    def __init__(self, arrive: Callable[[int, SimulatedPayload], None], size: int, *, by_hand: bool) -> None:
        self.by_hand = by_hand
        self.is_broken = False
        self.fails_next = False  # send
        self._arrive = arrive
        self._size = size
        self._payloads: deque[tuple[int, SimulatedPayload]] = deque()
        self._moved = trio.Event()

    def __len__(self) -> int:
        return len(self._payloads)

    async def send(self, payload: int, sealed: SimulatedMemfd) -> None:
        """BrokenResourceError: it is broken, or breaks now. Cancelled, nothing is sent."""
        await trio.lowlevel.checkpoint()
        while len(self._payloads) >= self._size and not self.is_broken:
            self._moved = trio.Event()
            await self._moved.wait()
        self.is_broken |= self.fails_next
        if self.is_broken:
            raise trio.BrokenResourceError("the payload socket is broken")
        self._payloads.append((payload, sealed.pass_on()))
        if not self.by_hand:
            self.move()

    def move(self, count: int | None = None) -> None:
        """Let so many payloads arrive, or all."""
        for _ in range(len(self._payloads) if count is None else min(count, len(self._payloads))):
            self._arrive(*self._payloads.popleft())
        self._moved.set()

    def cut(self) -> None:
        """Break for good: payloads on their way are lost, as the kernel closes them."""
        self.is_broken = True
        while self._payloads:
            self._payloads.popleft()[1].close()
        self._moved.set()


class SimulatedDecoder:
    """A Decoder that is moved by hand."""

    def __init__(self, decode: Decode, report: Callable[[PictureDecoded], None]) -> None:
        self._decode = decode
        self._report = report
        self._pictures: deque[Picture] = deque()
        self._begun: list[Picture] = []  # at most one

    def __len__(self) -> int:
        return len(self._begun) + len(self._pictures)

    def submit(self, picture: Picture) -> None:
        self._pictures.append(picture)

    def cancel(self, picture: Picture) -> bool:
        if picture not in self._pictures:
            return False
        self._pictures.remove(picture)
        return True

    def begin(self) -> None:
        """Begin the next picture, unless one is begun: it can no longer be cancelled, and `decode` reports it."""
        if self._pictures and not self._begun:
            self._begun.append(self._pictures.popleft())

    def decode(self) -> None:
        """Decode the picture that is begun, or else the next one."""
        self.begin()
        picture = self._begun.pop()
        source = picture.payload.source if picture.payload is not None else None
        assert isinstance(source, SimulatedPayload) and source.is_open, "a picture is decoded whose payload is closed"
        self._report(decode_picture(picture, self._decode))


class SimulatedCompiler:
    """A Compiler that is moved by hand."""

    def __init__(self, report: Callable[[GrammarCompiled], None]) -> None:
        self._report = report
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def submit(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def compile(self) -> None:
        """Compile the next grammar, also where its sequence has ended."""
        self._report(compile_for(self._sequences.popleft(), toy_compile))


SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11
PORTION = 4096  # bytes that a write moves between two checkpoints
PIPE_SIZE = 1 << 20  # bytes that a wire holds before a write blocks
PAYLOAD_QUEUE = 64  # payloads on their way before a send blocks
SMALL_PORTION, SMALL_PIPE = 32, 256  # the same where bytes are moved by hand, so that frames are torn and writes block
SMALL_PAYLOAD_QUEUE = 2


class SimulatedProcess(abc.ABC):
    """A worker's end of the pipes: the engine's messages arrive as they would by a reader thread.

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
        """Die, at once; the first exit code stays. Messages that were written still arrive."""
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
        """Let the engine read the end of the stream; bytes on their way to it are lost."""
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
        """Break the payload socket; payloads on their way are lost."""
        self.payloads.cut()

    def fail_send(self) -> None:
        """Fail to send the next payload and all after it; those on their way still arrive."""
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

    # ---- bytes, and the kernel's part -------------------------------------------------------------------------------

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
