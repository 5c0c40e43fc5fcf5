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
from trioengine.core.grammar import Grammar
from trioengine.core.image import ImageInfo, ImageProcessing
from trioengine.core.types import TokenIds
from trioengine.hub.model_config import Shape
from trioengine.hub.model_info import ModelFormat, ModelInfo
from trioengine.testing.toy_grammar import ToyFollower
from trioengine.testing.toy_template import toy_template
from trioengine.testing.toy_tokenizer import END_OF_TEXT as END_OF_TEXT
from trioengine.testing.toy_tokenizer import IM_END as IM_END
from trioengine.testing.toy_tokenizer import IM_START as IM_START
from trioengine.testing.toy_tokenizer import VOCAB_SIZE as VOCAB_SIZE
from trioengine.testing.toy_tokenizer import tokenizer_json
from trioengine.testing.toy_weights import toy_adapted
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import Tokenizer
from trioengine.worker.scheduling.images import DecodedImage, ImageError, TileShape

ToyImage: TypeAlias = tuple[Iterable[int], bytes]  # where its tiles begin in a prompt, and its bytes

TOY_TILE = TileShape(num_tokens=3, decoded_bytes=64 << 20, feature_bytes=1 << 20)
TOY_TILE_EDGE = 8  # pixels
TOY_EMBEDDING_SIZE = 8
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
    adapter: str | None = None,
) -> list[int]:
    """The reference: the toy model's answer with these weights, the end token included; a `seed` is for hot answers.

    `adapter` is the path of the session's adapter.

    It ends where it is complete by the grammar; in its first `min_tokens` tokens it avoids the `unwanted` ones.
    """
    follower = None if grammar is None else ToyFollower(grammar)
    values = array("L")
    answer: list[int] = []
    embedded, first = toy_embeddings(images, tile.num_tokens, weights), toy_adapted(weights, adapter)
    for position, token_id in enumerate(prompt):
        values.append(toy_value(embedded.get(position, token_id), values[-1] if values else first))
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


def toy_vector(value: int) -> bytes:
    """The embedding of a history, given the value of its last token in the KV cache."""
    numbers = [zlib.crc32(b"%d" % place, value) / 2**31 - 1 for place in range(TOY_EMBEDDING_SIZE)]
    length = math.hypot(*numbers)
    return struct.pack(f"<{TOY_EMBEDDING_SIZE}f", *(number / length for number in numbers))


def toy_embedding(token_ids: Iterable[int], weights: int = 0) -> bytes:
    """The reference: the embedding of a prompt with these weights, in little-endian float32."""
    value = weights
    for token_id in token_ids:
        value = toy_value(token_id, value)
    return toy_vector(value)


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


def check_toy_adapter(path: Path, matrices: Mapping[str, Shape]) -> None:
    """Raise ModelError where the name begins with `other`, which stands for an adapter of another model."""
    if path.name.startswith("other"):
        raise ModelError(f"{path}: an adapter of another model")


@cache
def toy_model(
    context_length: int = 512,
    *,
    images: bool = False,
    embeds: bool = False,
    prints_tools: bool = False,
    tool_form: str = "hermes",
    unpreparable: str | None = None,
) -> ModelInfo:
    """The toy model's files, as `hub.model_files.read_model` would give them; with `images` it takes images.

    With `embeds` it is an embedding model.

    With `prints_tools` its chat template prints the names of tools, and calls in the history; `tool_form` is the form
    of the calls in its answers. Its tokenizer raises PreparationFailed for texts that contain `unpreparable`.
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
        embedding_size=TOY_EMBEDDING_SIZE if embeds else None,
    )
