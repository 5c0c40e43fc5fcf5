"""A toy model: its next token is a hash of the whole history and of the images in it."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from trioengine.core.errors import ModelError
from trioengine.core.grammar import Grammar, GrammarFailed
from trioengine.core.image import ImageInfo, ImageProcessing
from trioengine.core.messages import INVALID_GRAMMAR, SAMPLING_FAILED, TokensRow
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import TokenIds
from trioengine.hub.model_info import ModelFormat, ModelInfo
from trioengine.testing.step_watch import StepWatch
from trioengine.testing.toy_grammar import ToyFollower, toy_allowed
from trioengine.testing.toy_template import toy_template
from trioengine.testing.toy_tokenizer import END_OF_TEXT as END_OF_TEXT
from trioengine.testing.toy_tokenizer import IM_END as IM_END
from trioengine.testing.toy_tokenizer import IM_START as IM_START
from trioengine.testing.toy_tokenizer import VOCAB_SIZE as VOCAB_SIZE
from trioengine.testing.toy_tokenizer import tokenizer_json
from trioengine.testing.toy_weights import TOY_PATH, toy_quantization, toy_weights
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import Tokenizer
from trioengine.worker.scheduling.images import DecodedImage, ImageError, Tile, TileShape
from trioengine.worker.scheduling.sequence import (
    BlockCopy,
    Limits,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
)

ToyImage: TypeAlias = tuple[Iterable[int], bytes]  # where its tiles begin in a prompt, and its bytes

TOY_TILE = TileShape(num_tokens=3, decoded_bytes=64 << 20, feature_bytes=1 << 20)
TOY_TILE_EDGE = 8  # pixels
UNREADABLE = b"\xff"  # bytes that begin with it cannot be decoded


@dataclass(frozen=True, slots=True)
class ToyProcessing(ImageProcessing):
    """Images are not scaled, and have tiles alone, without a whole image."""

    def num_tiles(self, width: int, height: int) -> int:
        return -(-width // self.tile_size) * -(-height // self.tile_size)

    def prompt_text(self, width: int, height: int) -> str:
        tile = "[" + self.image_token * self.tokens_per_tile
        return tile * self.num_tiles(width, height) + "]"


TOY_PROCESSING = ToyProcessing(
    image_token="<image>",
    image_token_id=259,
    tokens_per_tile=TOY_TILE.num_tokens,
    tile_size=TOY_TILE_EDGE,
    longest_edge=TOY_TILE_EDGE,
    splits=True,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


class ToyPicture:
    """A picture of one repeated byte, with those methods of a PIL image that are needed to send it."""

    mode = "RGB"

    def __init__(self, width: int, height: int, value: int = 0) -> None:
        self.size = (width, height)
        self._value = value

    @property
    def data(self) -> bytes:
        """The bytes for the worker; with the value 255 they cannot be decoded."""
        width, height = self.size
        return bytes([self._value]) * (width * height * 3)

    def convert(self, mode: str) -> ToyPicture:
        return self

    def crop(self, box: tuple[int, int, int, int]) -> ToyPicture:
        left, top, right, bottom = box
        return ToyPicture(right - left, bottom - top, self._value)

    def tobytes(self) -> bytes:
        return self.data


class DamagedPicture(ToyPicture):
    """As a PIL image whose file ends too early, which Pillow finds when the pixels are read."""

    def crop(self, box: tuple[int, int, int, int]) -> ToyPicture:
        raise OSError("image file is truncated (0 bytes not processed)")


def toy_file(width: int, height: int, value: int = 0) -> bytes:
    """An image file, as large as the pixels of such a ToyPicture; also with the value 255 it cannot be decoded."""
    header = _jpeg_header(width, height) if value == UNREADABLE[0] else _png_header(width, height)
    return header.ljust(width * height * 3, bytes([value]))


def _png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))


def _jpeg_header(width: int, height: int) -> bytes:
    """It begins with the byte 255, as every JPEG does."""
    frame = struct.pack(">BHHB", 8, height, width, 1) + bytes.fromhex("011100")
    return bytes.fromhex("ffd8 ffc0") + struct.pack(">H", 2 + len(frame)) + frame + bytes.fromhex("ffda")


def toy_num_tiles(info: ImageInfo) -> int:
    """How many tiles an image has."""
    return TOY_PROCESSING.num_tiles(info.width, info.height)


def toy_decode(data: memoryview, info: ImageInfo) -> DecodedImage:
    """A tile is a hash of the bytes and of its number."""
    if bytes(data[:1]) == UNREADABLE:
        raise ImageError("the toy model cannot read it")
    tiles = [toy_tile(bytes(data), number) for number in range(toy_num_tiles(info))]
    return DecodedImage(tiles, len(tiles))


def toy_tile(data: bytes, number: int) -> int:
    """The pixels of a tile."""
    return zlib.crc32(data, number)


def toy_features(tile: int, num_tokens: int, weights: int) -> list[int]:
    """Return the values in place of the token ids of a tile; they depend on the weights, as real features do."""
    return [zlib.crc32(b"%d %d" % (weights, offset), tile) for offset in range(num_tokens)]


def toy_embeddings(images: Iterable[ToyImage], num_tokens: int, weights: int) -> dict[int, int]:
    """The reference: the features in place of a prompt's token ids, by position."""
    found: dict[int, int] = {}
    for positions, data in images:
        for number, position in enumerate(positions):
            found.update(enumerate(toy_features(toy_tile(data, number), num_tokens, weights), position))
    return found


_LETTERS = b"abcdefghijklmnopqrstuvwxyz     "
GREEDY_UP_TO = 1.0  # the temperature; the tokens of hotter requests depend on their seeds
_END_EVERY = 24  # one token in so many ends the answer


def toy_value(token_id: int, before: int) -> int:
    """The KV cache's entry of a token: like real keys and values, it depends on everything before the token."""
    return zlib.crc32(token_id.to_bytes(4, "little"), before)


def toy_next(values: array[int], seed: int = 0) -> int:
    """The token after a history, given the values of its tokens in the KV cache; 0 stands for a greedy one."""
    digest = zlib.crc32(values.tobytes(), seed & 0xFFFFFFFF)
    if digest % _END_EVERY == 0:
        return IM_END
    return _LETTERS[(digest >> 8) % len(_LETTERS)]


def toy_answer(
    prompt: Iterable[int],
    max_tokens: int,
    *,
    ignore_eos: bool = False,
    weights: int = 0,
    images: Iterable[ToyImage] = (),
    tile: TileShape = TOY_TILE,
    grammar: Grammar | None = None,
    unwanted: Container[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
) -> list[int]:
    """The reference: the toy model's answer with these weights, the end token included; a `seed` is for hot answers.

    It ends where it is complete by the grammar; in its first `min_tokens` tokens it avoids the `unwanted` ones.
    """
    follower = None if grammar is None else ToyFollower(grammar)
    values = array("L")
    answer: list[int] = []
    embedded = toy_embeddings(images, tile.num_tokens, weights)
    for position, token_id in enumerate(prompt):
        values.append(toy_value(embedded.get(position, token_id), values[-1] if values else weights))
    while len(answer) < max_tokens and (ignore_eos or not answer or answer[-1] != IM_END):
        token_id = toy_next(values, seed)
        if follower is not None:
            token_id = follower.take(token_id, unwanted if len(answer) < min_tokens else ())
        answer.append(token_id)
        values.append(toy_value(token_id, values[-1]))
        if follower is not None and follower.is_complete:
            break
    return answer


def toy_logprobs(token_id: int, top: int) -> dict[int, float]:
    """The reference: the chosen token is the best one, and those after it in the vocabulary follow."""
    return {(token_id + rank) % VOCAB_SIZE: -0.5 * (rank + 1) for rank in range(max(top, 1))}


def toy_prompt_logprobs(token_ids: Iterable[int], top: int) -> list[dict[int, float]]:
    """The reference: the logprobs of a prompt's tokens but the first one."""
    return [toy_logprobs(token_id, top) for token_id in list(token_ids)[1:]]


def _seed_of(params: SamplingParams) -> int:
    """The seed on which the tokens of a request depend: only a hot one is not greedy."""
    return (params.seed or 0) if (params.temperature or 0.0) > GREEDY_UP_TO else 0


class Crash(Exception):
    """A step that a real worker would not survive."""


class ToyRunner:
    """A ModelRunner whose keys and values are `toy_value`s, in the slots that the block tables name.

    Raises AssertionError for a step that StepWatch refuses, that reads values of another history or of a request with
    another cache salt, or that encodes a tile twice.
    """

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._tile = limits.tile
        self._watch = StepWatch(limits)
        self._begun: set[Sequence] = set()
        self._newly_begun: list[tuple[int, int, int]] = []
        self._slots: dict[int, int] = {}  # values in slots of the KV cache
        self._salts: dict[int, str] = {}  # of the request that computed the value in a slot
        self._weights: int | None = 0  # None: discarded
        self.path = TOY_PATH
        self.asleep: frozenset[Tag] = frozenset()
        self.fail_requests: set[int] = set()  # these fail alone, at their next token
        self.poisoned: Mapping[int, int] = {}  # requests, and how many tokens they get before it crashes
        self.arrivals: Mapping[int, bool] = {}  # requests in order, and whether they have images or a grammar
        self.num_steps = self.num_computed = 0  # steps that were computed, and their tokens
        self.fail_wakes = 0  # so many of the next ones

    def load(self, path: str, asleep: frozenset[Tag]) -> None:
        """Begin with these weights; `asleep` is not there yet."""
        self.path, self.asleep = path, asleep
        self._watch.reset()
        self._weights = None if Tag.WEIGHTS in asleep else toy_weights(path)

    def sleep(self) -> None:
        self._slots.clear()
        self._salts.clear()
        self._watch.reset()
        self.asleep = ALL_TAGS

    def wake(self, tags: frozenset[Tag]) -> None:
        if self.fail_wakes:
            self.fail_wakes -= 1
            raise ModelError("made not to wake")
        if Tag.WEIGHTS in tags:
            self._weights = toy_weights(self.path)
        self.asleep -= tags

    def update_weights(self, path: str) -> str:
        """A path with a name that begins with `misshapen` has tensors of other shapes."""
        if Path(path).name.startswith("misshapen"):
            raise ModelError(f"{path}: other shapes")
        self.path = path
        self._weights = None if Tag.WEIGHTS in self.asleep else toy_weights(path)
        return toy_quantization(path)

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        assert not self.asleep, f"a forward pass while {self.asleep} sleep"
        for entry in output.scheduled:
            if entry.sequence.num_output_tokens >= self.poisoned.get(entry.sequence.request, math.inf):
                raise Crash
        weights = self._weights
        assert weights is not None, "a forward pass without weights"
        began = self._watch.take(output, self.arrivals)
        self._copy(output.copies)
        for entry in began:
            self._check_prefix(entry.sequence, weights)
            self._begin(entry.sequence)
        for tile in output.encode:
            self._encode(tile, weights)
        sampled: list[Sampled] = []
        for entry in output.scheduled:
            sequence = entry.sequence
            slots = self._slots_of(sequence)
            salt, computed = sequence.params.cache_salt, sequence.num_computed_tokens
            salted = {*map(self._salts.get, slots[:computed])} <= {salt}
            assert salted, f"request {sequence.request} reads values that were computed under another cache salt"
            embedded = self._embeddings(entry)
            for position in range(computed, computed + entry.num_new_tokens):
                before = self._slots[slots[position - 1]] if position else weights
                token_id = embedded.get(position, sequence.token_ids[position])
                self._slots[slots[position]] = toy_value(token_id, before)
                self._salts[slots[position]] = salt
            if not entry.samples:
                sampled += [self._scored(entry, None)] if entry.scores else []
                continue
            if sequence.request in self.fail_requests:
                sampled.append(sequence.failure(SAMPLING_FAILED, "failed on request"))
                continue
            values = array("L", map(self._slots.__getitem__, slots))
            token_id, top = toy_next(values, _seed_of(sequence.params)), sequence.params.logprobs
            if sequence.constraint is not None:
                is_short = sequence.num_output_tokens < sequence.params.min_tokens
                unwanted = sequence.eos_token_ids.union(sequence.params.stop_token_ids) if is_short else ()
                try:
                    token_id = toy_allowed(token_id, sequence.constraint.allowed(), unwanted)
                except GrammarFailed as exc:
                    sampled.append(sequence.failure(INVALID_GRAMMAR, f"grammar: {exc}"))
                    continue
            row = sequence.row(token_id, None if top is None else toy_logprobs(token_id, top))
            sampled.append(self._scored(entry, row) if entry.scores else row)
        self.num_steps += 1
        self.num_computed += output.num_tokens
        return sampled

    @staticmethod
    def _scored(entry: ScheduledSequence, row: TokensRow | None) -> TokensRow:
        sequence, top = entry.sequence, entry.sequence.params.prompt_logprobs or 0
        return sequence.scored_row(row, tuple(toy_logprobs(sequence.token_ids[each], top) for each in entry.scores))

    def _begin(self, sequence: Sequence) -> None:
        if sequence not in self._begun:  # else it was preempted
            self._begun.add(sequence)
            self._newly_begun.append((sequence.request, sequence.num_tokens, sequence.num_computed_tokens))

    def take_begun(self) -> list[tuple[int, int, int]]:
        """Return the requests that were begun since the last call, with their tokens and those that were computed."""
        begun, self._newly_begun = self._newly_begun, []
        return begun

    def _check_prefix(self, sequence: Sequence, weights: int) -> None:
        """Check that the values which a sequence begins with, from the prefix cache, belong to its own history."""
        value, computed = weights, sequence.num_computed_tokens
        for position in range(computed if sequence.images is None else 0):
            value = toy_value(sequence.token_ids[position], value)
            found = self._slots.get(self._slot(sequence.block_table, position))
            assert found == value, (
                f"request {sequence.request} begins with {computed} cached tokens, of which number {position} "
                f"is {'of another history' if found is not None else 'not computed'}"
            )

    def _encode(self, tile: Tile, weights: int) -> None:
        picture, number = tile
        assert self._tile is not None, "an image for a model that takes none"
        assert not tile.is_encoded, "a tile is encoded twice"
        assert isinstance(picture.tiles, list), "a tile is encoded that is not decoded"
        picture.features[number] = toy_features(picture.tiles[number], self._tile.num_tokens, weights)

    def _embeddings(self, entry: ScheduledSequence) -> dict[int, int]:
        """By position."""
        found: dict[int, int] = {}
        for tile, start, stop, offset in entry.tile_pieces:
            features = tile.picture.features[tile.number]
            assert isinstance(features, list), "a tile is computed that is not encoded"
            found.update(enumerate(features[start:stop], entry.sequence.num_computed_tokens + offset))
        return found

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        size = self._block_size
        held = [[self._slots[source * size + offset] for offset in range(count)] for source, _, count in copies]
        salts = [[self._salts[source * size + offset] for offset in range(count)] for source, _, count in copies]
        for (_, target, _), values, computed_under in zip(copies, held, salts, strict=True):
            behind = [0] * (size - len(values))
            self._slots.update(enumerate(values + behind, target * size))
            self._salts.update(enumerate(computed_under, target * size))

    def _slots_of(self, sequence: Sequence) -> list[int]:
        """Of all its tokens."""
        size = self._block_size
        slots = [slot for block in sequence.block_table for slot in range(block * size, (block + 1) * size)]
        assert len(slots) >= sequence.num_tokens, f"request {sequence.request} has too few blocks for its tokens"
        return slots[: sequence.num_tokens]

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size


class PreparationFailed(Exception):
    """Raised by the tokenizer of a model with unpreparable prompts."""


class _FailingTokenizer(Tokenizer):
    """Raises PreparationFailed for texts that contain `unpreparable`, as a tokenizer with a bug does."""

    unpreparable = ""

    def encode_pieces(self, text: str, restore: Callable[[str], str]) -> TokenIds:
        if self.unpreparable in text:
            raise PreparationFailed(text)
        return super().encode_pieces(text, restore)


def read_toy_model(path: Path, context_length: int, **options: Any) -> ModelInfo:
    """The toy at the path, with the options of `toy_model`.

    Raises ModelError where its name begins with `other`, which stands for another model.
    """
    if path.name.startswith("other"):
        raise ModelError(f"{path}: another architecture")
    return toy_model(context_length, **options)


@cache
def toy_model(
    context_length: int = 512,
    *,
    images: bool = False,
    prints_tools: bool = False,
    tool_form: str = "hermes",
    unpreparable: str | None = None,
) -> ModelInfo:
    """The toy model's files, as `hub.model_files.read_model` would give them; with `images` it takes images.

    With `prints_tools` its chat template prints the names of tools, and calls in the history; `tool_form` is that of
    the calls in its answers. Its tokenizer raises PreparationFailed for texts that contain `unpreparable`.
    """
    processing = TOY_PROCESSING if images else None
    tokenizer = (Tokenizer if unpreparable is None else _FailingTokenizer).from_json(tokenizer_json(processing))
    if isinstance(tokenizer, _FailingTokenizer) and unpreparable is not None:
        tokenizer.unpreparable = unpreparable
    return ModelInfo(
        path=Path("toy"),
        format=ModelFormat.GGUF,
        model_type="toy",
        context_length=context_length,
        vocab_size=VOCAB_SIZE + images,
        eos_token_ids=(IM_END, END_OF_TEXT),
        chat_template=ChatTemplate(toy_template(images=images, prints_tools=prints_tools, tool_form=tool_form)),
        tokenizer=tokenizer,
        images=processing,
    )
