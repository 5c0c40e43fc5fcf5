"""The `logprobs` of a text completion in OpenAI's form: four lists with an entry for each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from trioengine.core.types import Logprobs
from trioengine.serve.chat_response import LEAST
from trioengine.text.output import Detokenizer
from trioengine.text.tokenizer import Tokenizer

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of a tokenizer with byte fallback


class PromptText(NamedTuple):
    """The text of a prompt: as it was given, or decoded from token ids with the special tokens among them."""

    text: str
    num_before: int = 0  # special tokens that the tokenizer has put before the text


class TokenLists(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionLogprobs:
    """Renders the tokens of one choice: first its prompt, if that is echoed, and then its answer as it comes.

    The offsets of an answer begin at `offset`. A token that begins within a character has this character's offset.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special_tokens: bool, offset: int) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, str] = {}
        self._offset = offset
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def prompt(self, prompt: PromptText, ids: Sequence[int], positions: Sequence[Logprobs | None]) -> TokenLists:
        text, num_before = prompt
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        offsets, _ = _offsets(detokenizer, ids[num_before:], 0)
        return self._lists(ids, positions, [0] * num_before + [min(offset, len(text)) for offset in offsets])

    def answer(self, ids: Sequence[int], positions: Sequence[Logprobs]) -> TokenLists:
        offsets, self._offset = _offsets(self._detokenizer, ids, self._offset)
        return self._lists(ids, positions, offsets)

    def _lists(self, ids: Sequence[int], positions: Sequence[Logprobs | None], offsets: list[int]) -> TokenLists:
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": [
                None if position is None else max(position[token_id], LEAST)
                for token_id, position in zip(ids, positions, strict=True)
            ],
            "top_logprobs": [None if position is None else self._top(position) for position in positions],
            "text_offset": offsets,
        }

    def _top(self, position: Logprobs) -> dict[str, float]:
        """Return the log-probabilities by the tokens' names, best first; of tokens with one name the best."""
        top: dict[str, float] = {}
        for token_id in sorted(position, key=position.__getitem__, reverse=True):
            top.setdefault(self._name(token_id), max(position[token_id], LEAST))
        return top

    def _name(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = (
                f"token_id:{token_id}" if self._as_ids else name_of(token_id, self._tokenizer)
            )
        return name


def name_of(token_id: int, tokenizer: Tokenizer) -> str:
    r"""Return the text of a token, or if its bytes are not whole UTF-8, them as in "bytes:\xe2\x82"."""
    if tokenizer.is_byte_level:
        data = tokenizer.bytes_of((token_id,))
    elif match := _BYTE.fullmatch(tokenizer.token_string(token_id)):
        data = bytes.fromhex(match[1])
    else:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(first: TokenLists, then: TokenLists) -> TokenLists:
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + then["top_logprobs"],
        "text_offset": first["text_offset"] + then["text_offset"],
    }


def _offsets(detokenizer: Detokenizer, ids: Sequence[int], offset: int) -> tuple[list[int], int]:
    """Return the offsets of these tokens, of which the first has this one, and the offset of the next token."""
    offsets: list[int] = []
    for token_id in ids:
        offsets.append(offset)
        offset += len(detokenizer.feed((token_id,)))
    return offsets, offset
