"""Images are decoded by a thread of low priority, beside the steps."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trioengine.worker.scheduling.image_queue import Decode, PictureDecoded, decode_picture
from trioengine.worker.scheduling.images import Picture, TileShape

_NICE = 10  # so that a step that runs meanwhile keeps its cores


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model runner makes of images."""

    tile: TileShape
    decode: Decode  # called in the decoder's thread; the tiles refer to nothing of the bytes that it was given


class DecoderThread:
    """A Decoder; `submit` and `cancel` are called by one thread."""

    def __init__(self, decode: Decode, report: Callable[[PictureDecoded], None]) -> None:
        self._decode = decode
        self._report = report
        self._pictures: deque[Picture] = deque()  # each operation on it is atomic
        self._submitted = threading.Semaphore(0)  # at least as often as there are pictures
        threading.Thread(target=self._run, name="decoder", daemon=True).start()

    def submit(self, picture: Picture) -> None:
        self._pictures.append(picture)
        self._submitted.release()

    def cancel(self, picture: Picture) -> bool:
        try:
            self._pictures.remove(picture)
        except ValueError:
            return False
        return True

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._submitted.acquire():
            try:
                picture = self._pictures.popleft()
            except IndexError:  # it was cancelled
                continue
            self._report(decode_picture(picture, self._decode))
