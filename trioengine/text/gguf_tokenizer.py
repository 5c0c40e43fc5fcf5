"""Tokenizers of GGUF files: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`), from the file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief, excerpt

_TOKENS, _MERGES, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
_SCORES, _SPACE, _PRE = "tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.pre"
GGUF_ARRAYS = frozenset({_TOKENS, _MERGES, _TYPES, _SCORES})  # arrays that `tokenizer_from_gguf` needs decoded
_UNKNOWN, CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
_MAX_PIECE = 256  # characters; SentencePiece's trainer makes pieces of at most 16 unless it is configured otherwise
_MAX_MERGES = 1 << 21  # Gemma 3's 262,144 tokens have about a quarter as many


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Create a tokenizer from a GGUF file's metadata. Raises ModelError, naming the key, if it cannot be used."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(map(repr, sorted(_KINDS)))
        raise ModelError(f"tokenizer.ggml.model is {brief(kind)}, which is not supported; supported: {known}")
    types = metadata.get(_TYPES, [])
    if not isinstance(types, list):
        raise ModelError(f"{_TYPES} is not a list")
    tokens = _strings(metadata, _TOKENS)
    tokenizer = _KINDS[kind](metadata, tokens, types)
    tokenizer.add_special_tokens(_added(tokens, types, CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    begins = kind == "llama" or metadata.get(_PRE) in _WHOLE_WORDS
    ids = {
        "bos": _added_id(metadata, "bos", len(tokens), default=begins),
        "eos": _added_id(metadata, "eos", len(tokens), default=False),
    }
    added = {name: id for name, id in ids.items() if id is not None}
    if added:
        template = [name for name in ("bos", "$A", "eos") if name == "$A" or name in added]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(added.items()))
    return tokenizer


def _added_id(metadata: Mapping[str, Any], name: str, count: int, *, default: bool) -> int | None:
    """Return the id of the token that is put before or after a text, None for none; `default` is llama.cpp's."""
    flag, key = f"tokenizer.ggml.add_{name}_token", f"tokenizer.ggml.{name}_token_id"
    is_added, id = metadata.get(flag), metadata.get(key)
    if is_added is not None and not isinstance(is_added, bool):
        raise ModelError(f"{flag} must be true or false, got {brief(is_added)}")
    if not (default if is_added is None else is_added) or (is_added is None and id is None):
        return None
    if type(id) is not int or not 0 <= id < count:
        raise ModelError(f"{key} must be a token id below {count}, got {brief(id)}")
    return id


@contextmanager
def refusing(source: str) -> Iterator[None]:
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


def _added(tokens: list[str], types: list[Any], kind: int, *, special: bool) -> list[AddedToken]:
    found = [token for token, token_type in zip(tokens, types, strict=False) if token_type == kind]
    return [AddedToken(token, special=special, normalized=False) for token in found]


# ---- SentencePiece's BPE ------------------------------------------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[Any]) -> Tokenizer:
    """Create a tokenizer that merges by scores. A run of text after a special token gets a space prefix of its own.

    That is how llama.cpp and the Llama 2 tokenizer do it; a GGUF file does not store another way.
    """
    prefixes = metadata.get(_SPACE, True)
    if not isinstance(prefixes, bool):
        raise ModelError(f"{_SPACE} must be true or false, got {brief(prefixes)}")
    scores = _scores(metadata, len(tokens))
    vocabulary = {token: id for id, token in enumerate(tokens)}
    for byte in range(256):
        if f"<0x{byte:02X}>" not in vocabulary:
            raise ModelError(f"{_TOKENS} has no byte token <0x{byte:02X}>")
    merges = _merges_by_score(_mergeable(tokens, types, scores))
    with refusing(_TOKENS):
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixes else replace
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefixes else decoding)
    return tokenizer


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = metadata.get(_SCORES)
    if not isinstance(scores, list) or not set(map(type, scores)) <= {int, float}:
        raise ModelError(f"{_SCORES} is missing or not a list of numbers")
    if len(scores) != count:
        raise ModelError(f"{_SCORES} has {len(scores)} entries; {_TOKENS} has {count}")
    if any(score != score for score in scores):
        raise ModelError(f"{_SCORES} has an entry that is not a number (NaN)")
    return scores


def _mergeable(tokens: list[str], types: list[Any], scores: list[float]) -> list[str]:
    """Return the tokens that merges may make or take, best first, and in the order of their ids for equal scores."""
    apart = {id for id, kind in enumerate(types[: len(tokens)]) if kind in (_UNKNOWN, CONTROL, _BYTE)}
    best_first = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    return [tokens[id] for id in best_first if id not in apart]


def _merges_by_score(best_first: list[str]) -> list[tuple[str, str]]:
    """Return all pairs of these tokens that make another, the pairs that make the best token first.

    Of the pairs that make the same token, the longest left part comes first: SentencePiece merges the leftmost of
    equals, and in a run of equal characters the longest parts are on the left.
    """
    known = {token: token for token in best_first}
    merges: list[tuple[str, str]] = []
    for token in known:
        if len(token) > _MAX_PIECE:
            raise ModelError(f"{_TOKENS} has the token {brief(token)}, longer than {_MAX_PIECE} characters")
        for cut in range(len(token) - 1, 0, -1):
            right = known.get(token[cut:])
            if right is not None and (left := known.get(token[:cut])) is not None:
                merges.append((left, right))
        if len(merges) > _MAX_MERGES:
            raise ModelError(f"{_TOKENS} has more than {_MAX_MERGES} pairs of tokens that make a token")
    return merges


# ---- byte-level BPE -----------------------------------------------------------------------------------------------


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[Any]) -> Tokenizer:
    splitting = metadata.get(_PRE, "gpt-2")
    if not isinstance(splitting, str) or splitting not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise ModelError(f"tokenizer.ggml.pre is {brief(splitting)}, which is not supported; supported: {known}")
    merges = [_pair(merge) for merge in _strings(metadata, _MERGES)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    with refusing(_MERGES):  # a merge of unknown tokens
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    if splitting in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTINGS[splitting]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{_MERGES} has the entry {brief(merge)}, which is not a pair")
    return left, right


_KINDS: dict[str, Callable[[Mapping[str, Any], list[str], list[Any]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}

# ---- splitting before BPE: tokenizer.ggml.pre, with the patterns of the models' own tokenizer.json files -----------

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _CASES.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_TEKKEN = _CASES.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([_split(pattern), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _default() -> pre_tokenizers.PreTokenizer:
    """Split as llama.cpp does for the name `default`: punctuation apart, and digits three by three."""
    patterns = [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*map(_split, patterns), to_bytes])


SPLITTINGS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "dbrx": lambda: _by_regex(_LLAMA3),
    "default": _default,
    "gpt-2": _gpt2,
    "gpt-4o": lambda: _by_regex(_GPT4O),
    "lfm2": lambda: _by_regex(_LLAMA3),
    "llama-bpe": lambda: _by_regex(_LLAMA3),
    "llama-v3": lambda: _by_regex(_LLAMA3),
    "olmo": _gpt2,
    "qwen2": lambda: _by_regex(_QWEN2),
    "qwen35": lambda: _by_regex(_QWEN35),
    "refact": _smollm,
    "seed-coder": lambda: _by_regex(_SEED_CODER),
    "smaug-bpe": lambda: _by_regex(_LLAMA3),
    "smollm": _smollm,
    "starcoder": _smollm,
    "tekken": lambda: _by_regex(_TEKKEN),
}
# A word that is a token is one, whatever the merges are, and texts begin with the bos token by default.
_WHOLE_WORDS = frozenset({"lfm2", "llama-bpe", "llama-v3", "tekken"})
