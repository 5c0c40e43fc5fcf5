"""Two connections joined by a fake link, and messages to send over it."""

from trioengine.core.codec import encode, frame
from trioengine.core.config import WorkerConfig
from trioengine.core.connection import Connection, Role
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import (
    Activity,
    AddMessage,
    AddSession,
    Audit,
    Audited,
    Configure,
    EndSession,
    Fatal,
    FatalCode,
    ImageInput,
    Loading,
    PayloadConsumed,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Shutdown,
    Sleep,
    Slept,
    StopSession,
    Tokens,
    TokensRow,
    Updated,
    UpdateWeights,
    Wake,
    Woken,
    WorkerStatistics,
)
from trioengine.core.power import Tag
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, Usage, token_ids

STATISTICS = WorkerStatistics(*range(11))
PARAMS = ResolvedParams(max_tokens=4, seed=7, logit_bias={3: -1.5}, stop_token_ids=(5,))
USAGE = Usage(3, 1, 0, 0.5, 0.25)


def add_message(session=1, request=1, base=0, ids=(1, 2, 3), payloads=()):
    return AddMessage(session, request, base, token_ids(ids), PARAMS, (2,), images=tuple(map(image, payloads)))


def image(payload):
    info = ImageInfo(ImageFormat.PNG, 640, 480)
    return ImageInput(payload, "messages[0].content[1]", b"digest", info, 1000, token_ids((0, 2)))


def row(session=1, request=1, last=False):
    return TokensRow(
        session,
        request,
        token_ids([9]),
        ({9: -0.5, 4: -1.0},),
        FinishReason.STOP if last else None,
        USAGE if last else None,
    )


EVERY_MESSAGE = [
    Configure(WorkerConfig("model.gguf", max_model_len=100, asleep=(Tag.KV_CACHE,))),
    AddSession(1),
    add_message(payloads=(3, 5)),
    StopSession(1, 1),
    EndSession(1),
    Audit(1),
    Ping(1),
    Sleep(),
    Wake((Tag.WEIGHTS, Tag.KV_CACHE)),
    UpdateWeights("other.gguf", 2),
    Shutdown(),
    Loading(1, 2),
    Ready("llama", "cpu", "float32", 100, 64, 8, 16, "torch"),
    Tokens((row(), row(2, 2, last=True)), STATISTICS),
    RequestFailed(1, 1, "code", "wörds"),
    SessionEnded(1, STATISTICS),
    PayloadConsumed(3),
    Audited(1, (1, 2), (3,), 8, 4, 2, 2, (5,)),
    Pong(1, 2, Activity.IDLE, 0.5),
    Slept(),
    Woken(None),
    Updated("another architecture"),
    Fatal(FatalCode.MODEL, "no", "Traceback"),
]


class Pair:
    """An engine's and a worker's end; messages pass between them a byte at a time."""

    def __init__(self, max_model_len=64):
        self.engine, self.worker = Connection(Role.ENGINE), Connection(Role.WORKER)
        self.down(Configure(WorkerConfig("m")))
        self.up(Ready("llama", "cpu", "float32", 100, max_model_len, 8, 16, "torch"))

    def down(self, *messages):
        self._move(self.engine, self.worker, messages)

    def up(self, *messages):
        self._move(self.worker, self.engine, messages)

    @staticmethod
    def _move(sender, receiver, messages):
        received = []
        for byte in b"".join([sender.send(message) for message in messages]):
            receiver.receive_data(bytes([byte]))
            while (message := receiver.next_message()) is not None:
                received.append(message)
        assert received == list(messages)
        assert not receiver.has_partial_frame


def unchecked(message):
    """The frame that a peer without rules would write."""
    return frame(encode(message))
