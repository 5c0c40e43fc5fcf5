"""The decoder's thread: in order, of low priority, and what is cancelled is not begun."""

from __future__ import annotations

import os
import queue
import threading
from array import array

import pytest

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.testing.simulated_process import SimulatedPayload
from trioengine.worker.process import DecoderThread
from trioengine.worker.scheduling.image_queue import PictureDecoded
from trioengine.worker.scheduling.images import DecodedImage, ImageError, Payload, Picture, PictureStatus

INFO = ImageInfo(ImageFormat.PNG, 8, 8)


def picture(data: bytes) -> Picture:
    payload = Payload(1, SimulatedPayload(data))
    return Picture(data, INFO, len(data), 1, array("q"), PictureStatus.DECODING, payload, features=[None])


class Bench:
    """A decoder, what it reported, and a decode function that can be held up."""

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[PictureDecoded] = queue.SimpleQueue()
        self.entered, self.release = threading.Event(), threading.Event()
        self.nice = 0
        self.decoder = DecoderThread(self._decode, self._reports.put)

    def _decode(self, data: memoryview, info: ImageInfo) -> DecodedImage:
        self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if data == b"slow":
            self.entered.set()
            self.release.wait(60)
        if data == b"bad":
            raise ImageError("it is bad")
        return DecodedImage([bytes(data)], 1)

    def report(self) -> PictureDecoded:
        return self._reports.get(timeout=60)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_pictures_are_decoded_in_order_and_a_bad_one_is_reported(bench: Bench) -> None:
    pictures = [picture(data) for data in (b"cat", b"bad", b"dog")]
    for each in pictures:
        bench.decoder.submit(each)
    assert [bench.report() for _ in pictures] == [
        PictureDecoded(pictures[0], [b"cat"]),
        PictureDecoded(pictures[1], None, "it is bad"),
        PictureDecoded(pictures[2], [b"dog"]),
    ]


def test_the_thread_leaves_the_cores_to_the_steps(bench: Bench) -> None:
    bench.decoder.submit(picture(b"cat"))
    bench.report()
    assert bench.nice == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


def test_what_is_cancelled_is_not_begun_and_what_is_begun_is_reported(bench: Bench) -> None:
    slow, cancelled, last = picture(b"slow"), picture(b"cat"), picture(b"dog")
    for each in (slow, cancelled, last):
        bench.decoder.submit(each)
    bench.entered.wait(60)
    assert not bench.decoder.cancel(slow)
    assert bench.decoder.cancel(cancelled)
    assert not bench.decoder.cancel(cancelled)
    bench.release.set()
    assert [bench.report().picture for _ in range(2)] == [slow, last]
    assert not bench.decoder.cancel(last)
