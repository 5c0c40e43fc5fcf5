"""Text to token ids and back: tokenizers from a tokenizer.json or a GGUF file's metadata.

The underlying tokenizer always treats special tokens in a text as ordinary text (`encode_special_tokens`). Its
settings never change, so threads may share it; `Tokenizer` itself splits a text at special tokens to parse them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from trioengine.core.checks import MAX_COUNT
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.gguf_tokenizer import refusing, tokenizer_from_gguf
from trioengine.text.literals import any_of
from trioengine.text.reasoning import ANSWER_TAGS

_LONG = 1 << 12  # token ids that are decoded by the library's batch call, which releases the GIL
_SHORT, _NUM_KEPT = 1 << 10, 64  # characters; the ids of the latest short texts are kept: a template has the same ones


class Tokenizer:
    """Text to token ids and back. Safe for threads; long inputs do not block the other threads.

    `vocab_size` is the lesser one of the tokenizer's and the model's: a tokenizer may have an added pad token that the
    model lacks. All ids that the model accepts are below it; not every number below it is an id. `strips_space`: the
    text of a sequence of tokens lacks the first space, if it begins with one.
    """

    def __init__(self, tokenizer: _Tokenizer, *, vocab_size: int = MAX_COUNT) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._to_bytes, self.strips_space = _bytes_of_tokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        tags = self.special_tokens.keys() & ANSWER_TAGS
        self._has_tags = bool(tags)
        self._skipped_ids = self.special_ids - {self.special_tokens[tag] for tag in tags}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = min(max(vocabulary.values(), default=-1) + 1, vocab_size)
        # at least the UTF-8 length of the text of every token
        self.max_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        # the bytes of each token by id, b"" for unknown ids; in `ordinary_bytes` also for special tokens but tags
        self.token_bytes, self.ordinary_bytes = self._byte_tables(vocabulary)
        self._split = re.compile(f"({any_of(self.special_tokens)})") if self.special_tokens else None
        self._ids_of_short = lru_cache(_NUM_KEPT)(self._ids_of)

    @classmethod
    def from_json(cls, text: bytes | str, *, vocab_size: int = MAX_COUNT) -> Tokenizer:
        """Create from the contents of a tokenizer.json, for a model of `vocab_size` tokens. Raises ModelError."""
        with refusing("tokenizer.json"):
            tokenizer = cls(
                _Tokenizer.from_buffer(text.encode() if isinstance(text, str) else text), vocab_size=vocab_size
            )
            tokenizer.surrounded([])  # raises if the tokenizer cannot encode
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Create from a GGUF file's metadata. Raises ModelError for a kind of tokenizer that is not supported."""
        return cls(tokenizer_from_gguf(metadata))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in it are parsed, none is added."""
        if self._split is None:
            return self.encode_ordinary(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(self.encode_ordinary(piece) if special is None else (special,))
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the token ids of a text, in which special tokens are ordinary text."""
        return self._ids_of(text).tolist()

    def _ids_of(self, text: str) -> TokenIds:
        # `encode_batch_fast` leaves out the places in the text, which take a quarter of `encode`
        return token_ids(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else ())

    def encode_inside(self, text: str) -> list[int]:
        """Encode a text that follows another, as ordinary text: no space is put before it."""
        if not self.strips_space:
            return self.encode_ordinary(text)
        return [token.id for token in self._tokenizer.model.tokenize(text.replace(" ", "▁"))]

    def encode_pieces(self, text: str, restore: Callable[[str], str]) -> TokenIds:
        """Encode as `encode` does, each piece of text between special tokens after a call of `restore`."""
        ids = token_ids()
        for piece in [text] if self._split is None else self._split.split(text):
            special = self.special_tokens.get(piece)
            if special is not None:
                ids.append(special)
            else:
                piece = restore(piece)
                ids.extend(self._ids_of_short(piece) if len(piece) <= _SHORT else self._ids_of(piece))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        The tags of reasoning and tool calls are text, also where the tokenizer marks them as special tokens.
        """
        given = list(ids)
        if self._to_bytes is _piece_bytes:
            table = self.ordinary_bytes if skip_special_tokens else self.token_bytes
            text = b"".join(map(table.__getitem__, given)).decode(errors="replace")
            return text.removeprefix(" ") if self.strips_space else text
        if skip_special_tokens and self._has_tags:
            given, skip_special_tokens = [id for id in given if id not in self._skipped_ids], False
        if len(given) > _LONG:
            return str(self._tokenizer.decode_batch([given], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(given, skip_special_tokens=skip_special_tokens))

    def token_string(self, token_id: int) -> str:
        """Return a token as it is in the vocabulary; "" for an unknown id."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def surrounded(self, ids: list[int]) -> list[int]:
        """Return the ids with the special tokens that the tokenizer adds around a text."""
        before, after = self.surroundings
        return [*before, *ids, *after]

    @cached_property
    def surroundings(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before a text, and after it."""
        text = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        length = len(text)
        start = next((at for at in range(len(ids) - length + 1) if ids[at : at + length] == text), len(ids))
        return ids[:start], ids[start + length :]

    @property
    def is_byte_level(self) -> bool:
        """Whether a token stands for the same bytes in every context; the exception is the space of `strips_space`."""
        return self._to_bytes is not None

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of these tokens, none for an unknown id; for byte-level tokenizers only."""
        return b"".join(map(self.token_bytes.__getitem__, ids))

    def _byte_tables(self, vocabulary: Mapping[str, int]) -> tuple[ByteTable, ByteTable]:
        """Both tables in advance, so that a streamed token costs one lookup; empty unless `is_byte_level`."""
        if self._to_bytes is None:
            return ByteTable(), ByteTable()
        table = {id: self._to_bytes(token) for token, id in vocabulary.items() if id < self.vocab_size}
        return ByteTable(table), ByteTable({**table, **dict.fromkeys(self._skipped_ids & table.keys(), b"")})


class ByteTable(dict[int, bytes]):
    """The bytes of each token by id; a model may sample ids that its tokenizer does not have."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


# ---- the bytes of a token ------------------------------------------------------------------------------------------


def _bytes_of_tokens(tokenizer: _Tokenizer) -> tuple[Callable[[str], bytes] | None, bool]:
    """Return the function from a token to its bytes, None if they depend on others, and `strips_space`."""
    if tokenizer.decoder is None:
        return None, False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return _alphabet_bytes, False
    steps = decoder.get("decoders")
    if steps in (_PIECES, [*_PIECES, _STRIP]):
        return _piece_bytes, len(steps) > len(_PIECES)
    return None, False


# The decoders of SentencePiece's tokenizers. The library's own cannot be streamed: one byte that is not UTF-8 makes
# all bytes around it U+FFFD.
_PIECES: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _piece_bytes(token: str) -> bytes:
    if token.startswith("<0x") and (match := _BYTE_PIECE.fullmatch(token)):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _alphabet_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token is plain text
        return token.encode()
