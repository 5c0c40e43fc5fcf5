"""An engine core that takes images, its decoder and its payloads moved by hand, and the answers that it must give."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import (
    AddMessage,
    AddSession,
    Audit,
    Audited,
    FromWorker,
    ImageInput,
    PayloadConsumed,
    RequestFailed,
    Tokens,
    ToWorker,
)
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.simulated_process import SimulatedDecoder, SimulatedPayload
from trioengine.testing.toy_model import (
    TOY_TILE,
    TOY_TILE_EDGE,
    UNREADABLE,
    VOCAB_SIZE,
    ToyImage,
    toy_answer,
    toy_decode,
)
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.image_queue import PictureDecoded
from trioengine.worker.scheduling.images import PayloadArrived
from trioengine.worker.scheduling.sequence import Limits, Sampled, SchedulerOutput

BAD = UNREADABLE + b"bad"
IMAGE_TOKEN = 7
TILE_TOKENS = TOY_TILE.num_tokens


class RecordingRunner(ToyRunner):
    """Keeps what each step did: (request, tokens) of its sequences, and the numbers of the tiles that it encoded."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.steps: list[tuple[list[tuple[int, int]], list[int]]] = []

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        scheduled = [(entry.sequence.request, entry.num_new_tokens) for entry in output.scheduled]
        self.steps.append((scheduled, [tile.number for tile in output.encode]))
        return super().execute(output)


class ImageBench:
    """Each session has one request, of the same number; `sent` are payloads on their way, by id."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "max_model_len": 64,
            "kv_blocks_total": 64,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "tile": TOY_TILE,
            "max_tiles_per_step": 4,
        }
        self.limits = Limits(**(values | changes))
        self.runner = RecordingRunner(self.limits)
        self.decoded: list[PictureDecoded] = []
        self.decoder = SimulatedDecoder(toy_decode, self.decoded.append)
        self.core = EngineCore(self.runner, self.limits, lambda: 0.0, decoder=self.decoder)
        self.sent: dict[int, SimulatedPayload] = {}
        self.said: list[FromWorker] = []
        self.num_decoded = 0
        self.prompts: dict[int, tuple[list[int], list[ToyImage], int]] = {}
        self._last_payload = 0

    # ---- to the worker ----------------------------------------------------------------------------------------------

    def message(self, number: int, parts: list[int | bytes | tuple[bytes, int]], max_tokens: int = 3) -> AddMessage:
        """A prompt of token ids and images; an image is its bytes, or these and how many tiles it has."""
        ids: list[int] = []
        images: list[ToyImage] = []
        inputs: list[ImageInput] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            data, num_tiles = (part, 1) if isinstance(part, bytes) else part
            tiles = [len(ids) + TILE_TOKENS * index for index in range(num_tiles)]
            ids += [IMAGE_TOKEN] * TILE_TOKENS * num_tiles
            images.append((tiles, data))
            inputs.append(self.image(data, tiles))
        self.prompts[number] = ids, images, max_tokens
        params = ResolvedParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        return AddMessage(number, number, 0, token_ids(ids), params, (), 0, tuple(inputs))

    def image(self, data: bytes, tiles: list[int]) -> ImageInput:
        """Announces a payload, and puts it on its way."""
        self._last_payload += 1
        self.sent[self._last_payload] = SimulatedPayload(data)
        info = ImageInfo(ImageFormat.PNG, TOY_TILE_EDGE * len(tiles), TOY_TILE_EDGE)
        digest = blake2b(data, digest_size=16).digest()
        return ImageInput(self._last_payload, "messages[0].content[1]", digest, info, len(data), token_ids(tiles))

    def handle(self, *messages: ToWorker) -> list[FromWorker]:
        replies = [reply for message in messages for reply in self.core.handle(message)]
        self.said += replies
        self.core.check_integrity()
        return replies

    def add(self, number: int, parts: list[int | bytes | tuple[bytes, int]], max_tokens: int = 3) -> list[FromWorker]:
        """A session and its request; its payloads come at once."""
        replies = self.handle(AddSession(number), self.message(number, parts, max_tokens))
        return replies + self.arrive(*self.sent)

    def arrive(self, *payloads: int) -> list[FromWorker]:
        replies = []
        for payload in payloads:
            replies += self.core.handle(PayloadArrived(payload, self.sent.pop(payload)))
        self.said += replies
        self.core.check_integrity()
        return replies

    def decode(self) -> list[FromWorker]:
        """Decode the next image, and take it in."""
        self.decoder.decode()
        self.num_decoded += 1
        replies = self.core.handle(self.decoded.pop())
        self.said += replies
        self.core.check_integrity()
        return replies

    def step(self) -> list[tuple[int, int]]:
        """(request, tokens) of what a step computed."""
        before = len(self.runner.steps)
        self.said += self.core.step()
        self.core.check_integrity()
        return self.runner.steps[-1][0] if len(self.runner.steps) > before else []

    def run(self) -> None:
        """Until nothing is left to do; every answer is the reference's."""
        while self.core.has_work or len(self.decoder):
            if len(self.decoder):
                self.decode()
            self.step()
        for number, reason in self.ends.items():
            if reason is FinishReason.LENGTH:
                assert self.answers[number] == self.expected(number), f"request {number}"

    # ---- from it ----------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for reply in self.said:
            for row in reply.rows if isinstance(reply, Tokens) else ():
                found.setdefault(row.request, []).extend(row.token_ids)
        return found

    @property
    def ends(self) -> dict[int, FinishReason]:
        rows = [row for reply in self.said if isinstance(reply, Tokens) for row in reply.rows]
        return {row.request: row.finish_reason for row in rows if row.finish_reason is not None}

    @property
    def cached_tokens(self) -> dict[int, int]:
        rows = [row for reply in self.said if isinstance(reply, Tokens) for row in reply.rows]
        return {row.request: row.usage.cached_tokens for row in rows if row.usage is not None}

    @property
    def failures(self) -> dict[int, tuple[str, str]]:
        failed = [reply for reply in self.said if isinstance(reply, RequestFailed)]
        return {reply.request: (reply.code, reply.message) for reply in failed}

    @property
    def consumed(self) -> list[int]:
        return [reply.payload for reply in self.said if isinstance(reply, PayloadConsumed)]

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The payloads of AUDITED."""
        (audited,) = self.core.handle(Audit(1))
        assert isinstance(audited, Audited)
        return audited.payloads

    def expected(self, number: int) -> list[int]:
        prompt, images, max_tokens = self.prompts[number]
        return toy_answer(prompt, max_tokens, ignore_eos=True, images=images)
