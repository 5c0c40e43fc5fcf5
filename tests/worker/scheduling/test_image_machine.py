"""Random requests with images on a tiny KV cache: every token is the reference's, every payload and block comes back.

The reference knows nothing of tiles, caches or chunks: it puts hashes of the images' bytes in the places of their
tokens. Few and small images make shared, evicted and preempted ones common; room for two decoded tiles makes sequences
wait for each other's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from helpers.session_machine import SessionMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import (
    AddMessage,
    Audit,
    Audited,
    EndSession,
    FromWorker,
    ImageInput,
    PayloadConsumed,
    RequestFailed,
    SessionEnded,
    StopSession,
    Tokens,
)
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.simulated_process import SimulatedDecoder, SimulatedPayload
from trioengine.testing.toy_model import TOY_TILE_EDGE, UNREADABLE, VOCAB_SIZE, toy_answer, toy_decode
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import INVALID_IMAGE, EngineCore
from trioengine.worker.scheduling.image_queue import DECODED_MEMORY, PictureDecoded
from trioengine.worker.scheduling.images import PayloadArrived, Picture, TileShape
from trioengine.worker.scheduling.sequence import Limits, Sampled, SchedulerOutput, Sequence

IMAGE_TOKEN = 7
BAD = UNREADABLE + b"bad"
IMAGES = {b"one": 1, b"another": 1, b"two": 2, b"three": 3, BAD: 2}  # with their tiles


@dataclass
class Placed:
    """An image in a session's tokens."""

    data: bytes
    tiles: list[int]


@dataclass
class Mirror:
    tokens: list[int] = field(default_factory=list)
    images: list[Placed] = field(default_factory=list)
    request: int | None = None


class CheckingRunner(ToyRunner):
    """Checks how many tiles a step encodes, and that no sequence waits beside it."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._limits = limits
        self.core: EngineCore | None = None

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        assert self.core is not None
        assert len(output.encode) <= self._limits.max_tiles_per_step
        assert output.num_tokens <= self._limits.max_num_batched_tokens
        if output.encode and self._limits.max_num_seqs < self._limits.max_num_batched_tokens:
            scheduled = {entry.sequence for entry in output.scheduled}
            running = self.core._scheduler._running
            assert all(sequence in scheduled for sequence in running if sequence.is_decoding)
        return super().execute(output)


class ImageMachine(SessionMachine):
    max_sessions = 6
    mirrors: dict[int, Mirror]

    @initialize(
        kv_blocks_total=st.integers(6, 20),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(2, 12),
        chunked_prefill_size=st.integers(1, 8),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        tile=st.builds(TileShape, st.integers(1, 3), st.sampled_from([DECODED_MEMORY // 2, 1]), st.just(1)),
        max_tiles_per_step=st.integers(1, 2),
        encoder_cache_memory=st.integers(0, 4),
    )
    def start(self, **limits: object) -> None:
        self.limits = Limits(vocab_size=VOCAB_SIZE, max_model_len=40, **limits)
        assert self.limits.tile is not None
        self.tile = self.limits.tile
        self.runner = CheckingRunner(self.limits)
        self.decoded: list[PictureDecoded] = []
        self.decoder = SimulatedDecoder(toy_decode, self.decoded.append)
        self.core = EngineCore(self.runner, self.limits, lambda: 0.0, decoder=self.decoder)
        self.runner.core = self.core
        self.num_leaves: dict[int, int] = {}  # of the line, by request
        waiters = self.core._scheduler._waiters
        self.decode_later, waiters.decode = waiters.decode, self.leave_the_line
        self.mirrors = {}
        self.last_session = self.last_request = self.last_payload = 0
        self.largest = 0  # tiles of one prompt
        self.on_their_way: dict[int, bytes] = {}
        self.sources: dict[int, SimulatedPayload] = {}
        self.announced: set[int] = set()  # and not consumed

    @precondition(lambda self: self.idle or self.has_room)
    @rule(
        data=st.data(),
        fresh=st.booleans(),
        parts=st.lists(st.sampled_from([1, 2, *IMAGES]), min_size=0, max_size=5),
        max_tokens=st.integers(1, 12),
        num_early=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "", "a"]),
    )
    def add_message(
        self,
        data: st.DataObject,
        fresh: bool,
        parts: list[int | bytes],
        max_tokens: int,
        num_early: int,
        cache_salt: str,
    ) -> None:
        session = self.draw_session(data, Mirror(), fresh=fresh)
        mirror = self.mirrors[session]
        base = data.draw(st.sampled_from([0, len(mirror.tokens)]) | st.integers(0, len(mirror.tokens)))
        end_of = {id(image): image.tiles[-1] + self.tile.num_tokens for image in mirror.images}
        mirror.images = [image for image in mirror.images if end_of[id(image)] <= base]
        mirror.tokens = mirror.tokens[:base]
        for part in parts:
            if isinstance(part, int):
                mirror.tokens += [part] * part
            else:
                mirror.images.append(self.place(part, mirror.tokens))
        self.largest = max(self.largest, sum(len(image.tiles) for image in mirror.images))
        inputs = tuple(self.image_input(image, cache_salt) for image in mirror.images)
        for image in inputs[:num_early]:
            self.take(self.arrive(image.payload))
        self.last_request += 1
        mirror.request = self.last_request
        params = ResolvedParams(max_tokens=max_tokens, ignore_eos=True, seed=1, cache_salt=cache_salt)
        ids = token_ids(mirror.tokens[base:])
        self.announced.update(image.payload for image in inputs)
        self.take(self.core.handle(AddMessage(session, self.last_request, base, ids, params, (), 0, inputs)))
        fits = 0 < len(mirror.tokens) < self.limits.max_sequence_len
        assert (mirror.request is not None) is fits

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data())
    def payload_arrives(self, data: st.DataObject) -> None:
        self.take(self.arrive(data.draw(st.sampled_from(sorted(self.on_their_way)))))

    @precondition(lambda self: len(self.decoder))
    @rule()
    def decode(self) -> None:
        self.decoder.decode()

    @precondition(lambda self: self.decoded)
    @rule()
    def take_decoded(self) -> None:
        self.take(self.core.handle(self.decoded.pop(0)))

    @precondition(lambda self: self.mirrors)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.mirrors)))
        request = self.mirrors[session].request
        self.take(self.core.handle(StopSession(session, request or self.last_request + 1)))
        assert self.mirrors[session].request is None

    @precondition(lambda self: self.mirrors)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.mirrors)))
        del self.mirrors[session]
        ended, *consumed = self.core.handle(EndSession(session))
        assert ended == SessionEnded(session, self.core.statistics())
        self.take(consumed)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def break_sampling(self, data: st.DataObject) -> None:
        self.runner.fail_requests.add(self.mirrors[data.draw(st.sampled_from(self.busy))].request or 0)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.take(self.core.step())
            self.core.check_integrity()

    @rule()
    def flow(self) -> None:
        """A little of everything."""
        self.advance()

    @invariant()
    def audit_agrees(self) -> None:
        audited, *consumed = self.core.handle(Audit(1))
        assert consumed == []
        assert isinstance(audited, Audited)
        assert audited.sessions == tuple(sorted(self.mirrors))
        requests = [mirror.request for mirror in self.mirrors.values() if mirror.request is not None]
        assert audited.requests == tuple(sorted(requests))
        assert audited.payloads == tuple(sorted(self.announced))

    @invariant()
    def books_agree(self) -> None:
        self.core.check_integrity()
        pictures = self.core._scheduler.pictures
        assert pictures.decoded_bytes <= max(DECODED_MEMORY, self.largest * self.tile.decoded_bytes)
        if not self.busy:
            assert not self.core.has_work
            assert pictures.decoded_bytes == 0 or self.decoded  # for sequences that have ended
        assert sum(source.is_open for source in self.sources.values()) == self.core.num_payloads
        for session, mirror in self.mirrors.items():
            assert self.core.held_tokens(session).tolist() == mirror.tokens
        statistics = self.core.statistics()
        assert statistics.num_waiting + statistics.num_running == len(self.busy)
        assert statistics.encoder_cache_hits <= statistics.encoder_cache_queries

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        rounds_left = 200 * len(self.busy) * self.limits.max_sequence_len
        while self.busy or self.on_their_way or self.decoded:
            self.advance()
            rounds_left -= 1
            assert rounds_left > 0 or not self.busy, "no progress"
        for session in list(self.mirrors):
            self.core.handle(EndSession(session))
        self.core.check_integrity()
        assert not self.announced
        assert self.core.num_payloads == 0
        assert not any(source.is_open for source in self.sources.values())
        assert self.core._scheduler.pictures.decoded_bytes == 0

    # ---- help -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        if self.on_their_way:
            self.take(self.arrive(min(self.on_their_way)))
        if len(self.decoder):
            self.decoder.decode()
        if self.decoded:
            self.take_decoded()
        self.take(self.core.step())

    def leave_the_line(self, sequence: Sequence, needed: tuple[Picture, ...]) -> list[Sequence]:
        """No sequence leaves it more often than it has tiles."""
        assert sequence.images is not None
        self.num_leaves[sequence.request] = self.num_leaves.get(sequence.request, 0) + 1
        assert self.num_leaves[sequence.request] <= len(sequence.images.pieces(0, sequence.num_tokens))
        return self.decode_later(sequence, needed)

    def place(self, data: bytes, tokens: list[int]) -> Placed:
        tiles = []
        for _ in range(IMAGES[data]):
            tiles.append(len(tokens))
            tokens += [IMAGE_TOKEN] * self.tile.num_tokens
        return Placed(data, tiles)

    def image_input(self, image: Placed, cache_salt: str) -> ImageInput:
        self.last_payload += 1
        self.on_their_way[self.last_payload] = image.data
        digest = blake2b(image.data, digest_size=16, key=cache_salt.encode()).digest()
        info = ImageInfo(ImageFormat.PNG, TOY_TILE_EDGE * IMAGES[image.data], TOY_TILE_EDGE)
        return ImageInput(
            self.last_payload, f"image {image.data!r}", digest, info, len(image.data), token_ids(image.tiles)
        )

    def arrive(self, payload: int) -> list[FromWorker]:
        source = self.sources[payload] = SimulatedPayload(self.on_their_way.pop(payload))
        return self.core.handle(PayloadArrived(payload, source))

    def take(self, replies: list[FromWorker]) -> None:
        for reply in replies:
            match reply:
                case Tokens(rows=rows):
                    for row in rows:
                        mirror = self.mirrors[row.session]
                        assert mirror.request == row.request
                        if row.finish_reason is not FinishReason.ABORT:
                            self.take_token(mirror, row.token_ids.tolist())
                        if row.finish_reason is not None:
                            mirror.request = None
                case RequestFailed(session=session, request=request, code=code, message=message):
                    mirror = self.mirrors[session]
                    assert mirror.request == request
                    mirror.request = None
                    if code == INVALID_IMAGE:
                        assert BAD in [image.data for image in mirror.images]
                        assert message == f"image {BAD!r}: the toy model cannot read it"
                case PayloadConsumed(payload=payload):
                    assert not self.sources[payload].is_open
                    self.announced.remove(payload)
                case _:
                    raise AssertionError(f"{reply} was not asked for")

    def take_token(self, mirror: Mirror, tokens: list[int]) -> None:
        assert BAD not in [image.data for image in mirror.images]
        images = [(image.tiles, image.data) for image in mirror.images]
        assert tokens == toy_answer(mirror.tokens, 1, images=images, tile=self.tile)
        mirror.tokens += tokens


TestImageMachine = ImageMachine.TestCase
TestImageMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
