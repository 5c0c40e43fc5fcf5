"""The token ids of the turns that a conversation has committed, computed when a next prompt needs them."""

from __future__ import annotations

from typing import NamedTuple

from trioengine.core.types import TokenIds, token_ids
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.output import Detokenizer


class Tokenized(NamedTuple):
    """A text and its token ids."""

    token_ids: TokenIds  # empty if the whole conversation has to be tokenized
    rendering: str  # the text of these ids, without the closing
    closing: str  # the special token at the end of the last output, if there is one


class TokenizedTurns:
    """All turns up to an output. Most sessions end with their first one, and never need its ids."""

    def __init__(self, tokenizer: ChatTokenizer, prompt: TokenIds, rendering: str, output: TokenIds, text: str) -> None:
        """`rendering` is the text of `prompt`; `text` is that of `output`, as the reader saw it."""
        self.num_tokens = len(prompt) + len(output)
        self._tokenizer = tokenizer
        self._latest: _Turn | None = _Turn(prompt, rendering, output[:], text)
        self._tokenized: Tokenized | None = None

    def tokenized(self) -> Tokenized:
        """Return the text and its ids, which the first call computes. Threads may call it."""
        turn = self._latest
        if turn is not None:
            self._tokenized = _tokenize(self._tokenizer, turn)
            self._latest = None
        assert self._tokenized is not None, "it is set before the turn is dropped"
        return self._tokenized


class _Turn(NamedTuple):
    prompt: TokenIds
    rendering: str
    output: TokenIds
    text: str


def _tokenize(tokenizer: ChatTokenizer, turn: _Turn) -> Tokenized:
    kept, closing = _fitting(tokenizer, turn.output, turn.text)
    rendering = turn.rendering + tokenizer.protect(turn.text)
    if not tokenizer.tokenizer.special_ids.isdisjoint(kept[:-1] if closing else kept):
        return Tokenized(token_ids(), rendering, closing)
    return Tokenized(turn.prompt + kept, rendering, closing)


def _special(tokenizer: ChatTokenizer, token_id: int) -> str:
    """Return the special token of this id; "" for an ordinary token, and for an image token."""
    specials, images = tokenizer.tokenizer.special_tokens, tokenizer.images
    if images is not None and token_id == images.image_token_id:
        return ""
    return next((text for text, id in specials.items() if id == token_id), "")


def _fitting(tokenizer: ChatTokenizer, output: TokenIds, text: str) -> tuple[TokenIds, str]:
    """Return ids of exactly this text, and the special token at their end, if there is one.

    They are the output's own ids, except at the end of an output that a stop string cut within a token.
    """
    closing = _special(tokenizer, output[-1]) if output else ""
    for ids, end in [(output, ""), (output[:-1], closing)] if closing else [(output, "")]:
        for skip in (False, True):
            if tokenizer.decode(ids, skip_special_tokens=skip) == text and (end or not (closing and skip)):
                return output, end
    count, length = max(_agreement(tokenizer, output, text, skip) for skip in (False, True))
    kept = output[:count]
    kept.extend(tokenizer.tokenizer.encode_ordinary(text[length:]))
    return kept, ""


def _agreement(tokenizer: ChatTokenizer, output: TokenIds, text: str, skip: bool) -> tuple[int, int]:
    """Return how many of the ids agree with the text, and the number of their characters."""
    detokenizer = Detokenizer(tokenizer.tokenizer, skip_special_tokens=skip)
    agreed, at = (0, 0), 0
    for count, token_id in enumerate(output, 1):
        piece = detokenizer.feed((token_id,))
        if not text.startswith(piece, at):
            break
        at += len(piece)
        if not detokenizer.is_pending:
            agreed = (count, at)
    return agreed
