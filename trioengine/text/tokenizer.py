"""The tokenizer: from a tokenizer.json, or from the metadata of a GGUF file.

The underlying tokenizer always treats special tokens in a text as ordinary text (`encode_special_tokens`), and nothing
of it is ever switched afterwards, so threads may share it; where special tokens are to be parsed, the text is split at
them here.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as _Tokenizer

from trioengine.core.bounds import MAX_COUNT, brief, excerpt
from trioengine.core.errors import ModelError
from trioengine.core.types import TokenIds, token_ids

_TOKENS, _MERGES, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
GGUF_ARRAYS = frozenset({_TOKENS, _MERGES, _TYPES})  # of a GGUF file's metadata, that `from_gguf` needs decoded
CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# characters, or token ids. What is longer goes through the calls for batches, which let other threads run meanwhile;
# the others keep the GIL, which a busy thread would give back after milliseconds only
_LONG = 1 << 12


class Tokenizer:
    """Text to token ids and back. Safe for threads, and what is long keeps none of them waiting.

    A model may know fewer ids than its tokenizer, which then has a pad token that was added: `vocab_size` is the
    lesser of both numbers. Every id that the model can be given is below it; not every number is an id.
    """

    def __init__(self, tokenizer: _Tokenizer, *, vocab_size: int = MAX_COUNT) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = min(max(vocabulary.values(), default=-1) + 1, vocab_size)
        # of the text that a token stands for
        self.max_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        self._token_bytes, self._ordinary_bytes = self._tables(vocabulary)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @classmethod
    def from_json(cls, text: bytes | str, *, vocab_size: int = MAX_COUNT) -> Tokenizer:
        """From the contents of a tokenizer.json, for a model of `vocab_size` tokens. Raises ModelError."""
        with _refusing("tokenizer.json"):
            tokenizer = cls(
                _Tokenizer.from_buffer(text.encode() if isinstance(text, str) else text), vocab_size=vocab_size
            )
            tokenizer.surrounded([])  # it may be one that encodes nothing
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's metadata. Raises ModelError for a kind of tokenizer that is not supported."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelError(f"tokenizer.ggml.model is {brief(kind)}, which is not supported; supported: 'gpt2'")
        splitting = metadata.get("tokenizer.ggml.pre", "gpt-2")
        if not isinstance(splitting, str) or splitting not in _SPLITTINGS:
            known = ", ".join(sorted(_SPLITTINGS))
            raise ModelError(f"tokenizer.ggml.pre is {brief(splitting)}, which is not supported; supported: {known}")
        types = metadata.get(_TYPES, [])
        if not isinstance(types, list):
            raise ModelError(f"{_TYPES} is no list")
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
        """Token ids of a text; special tokens in it are parsed, none is added."""
        if self._split is None:
            return self.encode_ordinary(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(self.encode_ordinary(piece) if special is None else (special,))
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is special."""
        if len(text) > _LONG:
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def encode_pieces(self, text: str, restore: Callable[[str], str]) -> TokenIds:
        """As `encode`, but each piece between special tokens goes through `restore` first."""
        ids = token_ids()
        for piece in [text] if self._split is None else self._split.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(self.encode_ordinary(restore(piece)) if special is None else (special,))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 are U+FFFD."""
        given = list(ids)
        if len(given) > _LONG:
            return str(self._tokenizer.decode_batch([given], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(given, skip_special_tokens=skip_special_tokens))

    def token_string(self, token_id: int) -> str:
        """A token as the vocabulary has it; "" for an unknown id."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def surrounded(self, ids: list[int]) -> list[int]:
        """With the special tokens that the tokenizer.json puts around a text; a GGUF file has none."""
        before, after = self._surroundings
        return [*before, *ids, *after]

    @cached_property
    def _surroundings(self) -> tuple[list[int], list[int]]:
        text = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        length = len(text)
        start = next((at for at in range(len(ids) - length + 1) if ids[at : at + length] == text), len(ids))
        return ids[:start], ids[start + length :]

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a token is a string of bytes, whatever stands beside it."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """What these tokens stand for, nothing for an unknown id; only for a byte-level tokenizer."""
        return _joined(self._token_bytes, ids)

    def ordinary_bytes_of(self, ids: Sequence[int]) -> bytes:
        """As `bytes_of`, without the special tokens."""
        return _joined(self._ordinary_bytes, ids)

    def _tables(self, vocabulary: Mapping[str, int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """By id, so that a streamed token costs one look: the bytes of each token, and without the special ones."""
        if not self.is_byte_level:
            return {}, {}
        table = {id: _to_bytes(token) for token, id in vocabulary.items() if id < self.vocab_size}
        return table, {id: b"" if id in self.special_ids else data for id, data in table.items()}


def _joined(table: Mapping[int, bytes], ids: Sequence[int]) -> bytes:
    try:
        return b"".join(map(table.__getitem__, ids))
    except KeyError:  # a model may know ids that its tokenizer does not
        return b"".join([table.get(id, b"") for id in ids])


@contextmanager
def _refusing(source: str) -> Iterator[None]:
    """Raise ModelError for any error of the tokenizers library: it raises Exception itself, and Rust's panics."""
    try:
        yield
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise ModelError(f"{source} cannot be used: {excerpt(str(exc))}") from exc


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{key} is missing or no list of strings")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{_MERGES} has the entry {brief(merge)}, which is no pair")
    return left, right


def _added(tokens: list[str], types: list[Any], kind: int, *, special: bool) -> list[AddedToken]:
    found = [token for token, token_type in zip(tokens, types, strict=False) if token_type == kind]
    return [AddedToken(token, special=special, normalized=False) for token in found]


# ---- how a text is split before BPE: tokenizer.ggml.pre, as the models' own tokenizer.json files have it -----------

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
    """GPT-2's printable character for each byte, the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token is plain text
        return token.encode()


_MAX_PENDING = 16  # tokens that a character of a tokenizer with byte fallback can take, and more


class Detokenizer:
    """The texts given add up to what the tokenizer decodes from all the ids at once."""

    __slots__ = (
        "_bytes_of",
        "_context",
        "_is_byte_level",
        "_pending",
        "_rest",
        "_skip_special_tokens",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._is_byte_level = tokenizer.is_byte_level
        self._bytes_of = tokenizer.ordinary_bytes_of if skip_special_tokens else tokenizer.bytes_of
        self._rest = b""  # of a byte-level tokenizer: the beginning of a character
        self._context: list[int] = []  # of any other: ids whose text was given, kept for what follows them
        self._pending: list[int] = []  # and ids whose text was not

    @property
    def is_pending(self) -> bool:
        """Whether ids were fed whose text is not given yet."""
        return bool(self._rest or self._pending)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        if self._is_byte_level:
            data = self._rest + self._bytes_of(ids)
            text, num_decoded = codecs.utf_8_decode(data, "replace")
            self._rest = data[num_decoded:]
            return text
        return "".join([self._feed_one(token_id) for token_id in ids])

    def flush(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that was never completed."""
        if self._pending:
            return self._give()
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")

    def _feed_one(self, token_id: int) -> str:
        """Decode the new ids behind some that came before: a tokenizer may join or strip at the borders."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return ""  # perhaps a character that is not complete
        return self._give()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special_tokens)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip_special_tokens)
        return after[len(before) :]

    def _give(self) -> str:
        text = self._new_text()
        if text:
            self._context, self._pending = self._pending, []
        else:
            self._context, self._pending = self._context + self._pending, []
        return text
