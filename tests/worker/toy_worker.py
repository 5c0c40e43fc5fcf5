"""A worker process with a runner that counts, and the engine's end of its pipes.

Run as a script it is `python -m trioengine.worker` but for the model; CONFIGURE's `model_path` says what loading does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trioengine.core.config import WorkerConfig
from trioengine.core.connection import Connection, Role
from trioengine.core.errors import ModelError
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import AddMessage, Configure, FromWorker, ImageInput, Loading, Ready, ToWorker
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.worker.process import run
from trioengine.worker.scheduling.images import DecodedImage, ImageError, TileShape, Vision
from trioengine.worker.scheduling.runner_interface import ModelInfo, OnProgress
from trioengine.worker.scheduling.sequence import Sampled, SchedulerOutput, Sequence
from trioengine.worker.transport import PAYLOAD_ID, SEALS

VOCAB_SIZE = 1000


class CountingRunner:
    """The next token is the last one plus 1.

    `before_step` is called at the start of each step; `describe` makes the sampled token of a sequence; `prepare`
    prepares nothing.
    """

    def __init__(self) -> None:
        self.info = ModelInfo("toy", "cpu", "float32", "torch", VOCAB_SIZE, 512, kv_blocks_total=128, block_size=16)
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        self.describe: Callable[[Sequence, int], Sampled] = Sequence.row
        self.prepare: Callable[[], bool] = lambda: False

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        self.before_step(output)
        return [
            self.describe(entry.sequence, (entry.sequence.token_ids[-1] + 1) % VOCAB_SIZE)
            for entry in output.scheduled
            if entry.samples
        ]


class EngineEnd:
    """The engine's end of two pipes, with blocking reads."""

    def __init__(self, fd_in: int, fd_out: int, payloads: socket.socket | None = None) -> None:
        self.fd_in = fd_in
        self.fd_out = fd_out
        self._payloads = payloads
        self.connection = Connection(Role.ENGINE)

    def send(self, *messages: ToWorker) -> None:
        self.write(b"".join(self.connection.send(message) for message in messages))

    def write(self, data: bytes) -> None:
        os.write(self.fd_out, data)

    @property
    def payloads(self) -> socket.socket:
        assert self._payloads is not None
        return self._payloads

    def send_payload(self, payload: int, fd: int) -> None:
        """The descriptor is passed on, and closed here."""
        rights = array("i", [fd])
        self.payloads.sendmsg([PAYLOAD_ID.pack(payload)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(fd)

    def receive(self) -> FromWorker | None:
        """The next message; None: the worker's end is closed."""
        while (message := self.connection.next_message()) is None:
            data = os.read(self.fd_in, 1 << 16)
            if not data:
                assert not self.connection.has_partial_frame
                return None
            self.connection.receive_data(data)
        return message  # type: ignore[return-value]

    def configure(self, model_path: str = "toy", *, chunked_prefill_size: int | None = None) -> Ready:
        """CONFIGURE, and wait for READY."""
        self.send(Configure(WorkerConfig(model_path, chunked_prefill_size=chunked_prefill_size)))
        while isinstance(message := self.receive(), Loading):
            pass
        assert isinstance(message, Ready), message
        return message

    def close(self) -> None:
        os.close(self.fd_in)
        os.close(self.fd_out)


def request(session: int, number: int, ids: list[int], max_tokens: int = 3, *images: ImageInput) -> AddMessage:
    """The first message of a session."""
    params = ResolvedParams(max_tokens=max_tokens, seed=1)
    return AddMessage(session, number, 0, token_ids(ids), params, (), images=images)


def image_of(payload: int, data: bytes, tiles: list[int]) -> ImageInput:
    info = ImageInfo(ImageFormat.PNG, 8, 8)
    return ImageInput(payload, "messages[0].content[1]", data, info, len(data), token_ids(tiles))


def memfd(data: bytes) -> int:
    """Sealed bytes."""
    fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def memfds_of(pid: int) -> int:
    """How many descriptors of memfds a process has."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            found += str(path.readlink()).startswith("/memfd:")
    return found


class SeeingRunner(CountingRunner):
    """It sees of an image the sum of its bytes, and says that in place of the token that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, vision=Vision(TileShape(2, 1, 1), self._decode))

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        for picture, number in output.encode:
            assert isinstance(picture.tiles, list)
            picture.features[number] = picture.tiles[number]
        sampled = super().execute(output)
        seen = [piece.tile.picture.features[0] for entry in output.scheduled for piece in entry.tile_pieces]
        return [replace(row, token_ids=token_ids((sum(seen),))) for row in sampled] if seen else sampled

    @staticmethod
    def _decode(data: memoryview, info: ImageInfo) -> DecodedImage:
        if data == b"bad":
            raise ImageError("it is bad")
        return DecodedImage([sum(data)], 1)


def load(config: WorkerConfig, on_progress: OnProgress) -> tuple[ModelInfo, CountingRunner]:
    """`model_path`: "bad" raises ModelError, "noisy" prints, "child" starts a process and names it in model_type.

    "seeing" takes images.
    """
    runner = SeeingRunner() if config.model_path == "seeing" else CountingRunner()
    on_progress(1, 2)
    if config.model_path == "bad":
        raise ModelError("no such model")
    if config.model_path == "noisy":
        print("printed while loading", flush=True)
    if config.model_path == "child":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        runner.info = replace(runner.info, model_type=str(child.pid))
    on_progress(2, 2)
    return runner.info, runner


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load))
