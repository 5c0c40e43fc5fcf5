"""Payloads without descriptors: sealed bytes that count who has them open, their way to a worker, and a decoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from trioengine.worker.scheduling.image_queue import PictureDecoded, decode_picture
from trioengine.worker.scheduling.images import Decode, Picture


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
        """It breaks, for good: what is on its way is lost, as the kernel closes it."""
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

    def __len__(self) -> int:
        return len(self._pictures)

    def submit(self, picture: Picture) -> None:
        self._pictures.append(picture)

    def cancel(self, picture: Picture) -> bool:
        if picture not in self._pictures:
            return False
        self._pictures.remove(picture)
        return True

    def decode(self) -> None:
        """The next picture."""
        picture = self._pictures.popleft()
        source = picture.payload.source if picture.payload is not None else None
        assert isinstance(source, SimulatedPayload) and source.is_open, "a picture is decoded whose payload is closed"
        self._report(decode_picture(picture, self._decode))
