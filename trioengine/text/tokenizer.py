"""Text to token ids and back: tokenizers from a tokenizer.json or a GGUF file's metadata.

The underlying tokenizer always treats special tokens in a text as ordinary text (`encode_special_tokens`). Its
settings never change, so threads may share it; `Tokenizer` itself splits a text at special tokens to parse them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as _Tokenizer

from trioengine.core.checks import MAX_COUNT
from trioengine.core.errors import ModelError
from trioengine.core.types import TokenIds, token_ids
from trioengine.core.wording import brief, excerpt
from trioengine.text.reasoning import ANSWER_TAGS

_TOKENS, _MERGES, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
GGUF_ARRAYS = frozenset({_TOKENS, _MERGES, _TYPES})  # arrays of a GGUF file's metadata that `from_gguf` needs decoded
CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# Characters, or token ids. Longer inputs go through the library's batch calls, which release the GIL. Shorter ones keep
# it: taking it back from a busy thread would cost milliseconds.
_LONG = 1 << 12


class Tokenizer:
    """Text to token ids and back. Safe for threads; long inputs do not block the other threads.

    `vocab_size` is the lesser one of the tokenizer's and the model's: a tokenizer may have an added pad token that the
    model lacks. All ids that the model accepts are below it; not every number below it is an id.
    """

    def __init__(self, tokenizer: _Tokenizer, *, vocab_size: int = MAX_COUNT) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
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
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @classmethod
    def from_json(cls, text: bytes | str, *, vocab_size: int = MAX_COUNT) -> Tokenizer:
        """Create from the contents of a tokenizer.json, for a model of `vocab_size` tokens. Raises ModelError."""
        with _refusing("tokenizer.json"):
            tokenizer = cls(
                _Tokenizer.from_buffer(text.encode() if isinstance(text, str) else text), vocab_size=vocab_size
            )
            tokenizer.surrounded([])  # raises if the tokenizer cannot encode
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Create from a GGUF file's metadata. Raises ModelError for a kind of tokenizer that is not supported."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelError(f"tokenizer.ggml.model is {brief(kind)}, which is not supported; supported: 'gpt2'")
        splitting = metadata.get("tokenizer.ggml.pre", "gpt-2")
        if not isinstance(splitting, str) or splitting not in _SPLITTINGS:
            known = ", ".join(sorted(_SPLITTINGS))
            raise ModelError(f"tokenizer.ggml.pre is {brief(splitting)}, which is not supported; supported: {known}")
        types = metadata.get(_TYPES, [])
        if not isinstance(types, list):
            raise ModelError(f"{_TYPES} is not a list")
        tokens = _strings(metadata, _TOKENS)
        merges = [_pair(merge) for merge in _strings(metadata, _MERGES)]
        vocabulary = {token: id for id, token in enumerate(tokens)}
        with _refusing(_MERGES):  # a merge of unknown tokens
            model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting == "llama-bpe")
        tokenizer = _Tokenizer(model)
        if splitting == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _SPLITTINGS[splitting]()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(_added(tokens, types, CONTROL, special=True))
        tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
        return cls(tokenizer)

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
        if len(text) > _LONG:
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def encode_pieces(self, text: str, restore: Callable[[str], str]) -> TokenIds:
        """Encode as `encode` does, each piece of text between special tokens after a call of `restore`."""
        ids = token_ids()
        for piece in [text] if self._split is None else self._split.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(self.encode_ordinary(restore(piece)) if special is None else (special,))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        The tags of reasoning and tool calls are text, also where the tokenizer marks them as special tokens.
        """
        given = list(ids)
        if skip_special_tokens and self._has_tags:
            given, skip_special_tokens = [id for id in given if id not in self._skipped_ids], False
        if len(given) > _LONG:
            return str(self._tokenizer.decode_batch([given], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(given, skip_special_tokens=skip_special_tokens))

    def token_string(self, token_id: int) -> str:
        """Return a token as it is in the vocabulary; "" for an unknown id."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def surrounded(self, ids: list[int]) -> list[int]:
        """Return the ids with the special tokens that the tokenizer.json adds around a text; a GGUF file has none."""
        before, after = self.surroundings
        return [*before, *ids, *after]

    @cached_property
    def surroundings(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer.json adds before a text, and after it."""
        text = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        length = len(text)
        start = next((at for at in range(len(ids) - length + 1) if ids[at : at + length] == text), len(ids))
        return ids[:start], ids[start + length :]

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a token stands for the same bytes in every context."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of these tokens, none for an unknown id; for byte-level tokenizers only."""
        return b"".join(map(self.token_bytes.__getitem__, ids))

    def _byte_tables(self, vocabulary: Mapping[str, int]) -> tuple[ByteTable, ByteTable]:
        """Both tables in advance, so that a streamed token costs one lookup; empty unless `is_byte_level`."""
        if not self.is_byte_level:
            return ByteTable(), ByteTable()
        table = {id: _to_bytes(token) for token, id in vocabulary.items() if id < self.vocab_size}
        return ByteTable(table), ByteTable({**table, **dict.fromkeys(self._skipped_ids & table.keys(), b"")})


class ByteTable(dict[int, bytes]):
    """The bytes of each token by id; a model may sample ids that its tokenizer does not have."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


@contextmanager
def _refusing(source: str) -> Iterator[None]:
    """Convert every error of the tokenizers library to ModelError: it raises Exception itself, and Rust's panics."""
    try:
        yield
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise ModelError(f"{source} cannot be used: {excerpt(str(exc))}") from exc


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{key} is missing or not a list of strings")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{_MERGES} has the entry {brief(merge)}, which is not a pair")
    return left, right


def _added(tokens: list[str], types: list[Any], kind: int, *, special: bool) -> list[AddedToken]:
    found = [token for token, token_type in zip(tokens, types, strict=False) if token_type == kind]
    return [AddedToken(token, special=special, normalized=False) for token in found]


# ---- splitting before BPE: tokenizer.ggml.pre, with the patterns of the models' own tokenizer.json files -----------

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_SPLITTINGS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _by_regex(_LLAMA3),
    "qwen2": lambda: _by_regex(_QWEN2),
    "smollm": _smollm,
}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token is plain text
        return token.encode()
