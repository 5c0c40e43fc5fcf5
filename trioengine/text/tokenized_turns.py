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


NOTHING = Tokenized(token_ids(), "", "")


class TokenizedTurns:
    """All turns up to an output. Most sessions end with their first one, and never need its ids."""

    def __init__(self, tokenizer: ChatTokenizer, prompt: TokenIds, rendering: str, output: TokenIds, text: str) -> None:
        """`rendering` is the text of `prompt`; `text` is that of `output`, as the reader saw it."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._rendering = rendering
        self._output = output[:]
        self._text = text
        self._tokenized: Tokenized | None = None

    @property
    def num_tokens(self) -> int:
        """About the number of ids."""
        return len(self._prompt) + len(self._output)

    def tokenized(self) -> Tokenized:
        """Return the text and its ids, which the first call computes. Threads may call it."""
        if self._tokenized is None:
            self._tokenized = self._tokenize()
        return self._tokenized

    def _tokenize(self) -> Tokenized:
        kept, closing = self._fitting()
        rendering = self._rendering + self._tokenizer.protect(self._text)
        if not self._tokenizer.tokenizer.special_ids.isdisjoint(kept[:-1] if closing else kept):
            return Tokenized(token_ids(), rendering, closing)
        return Tokenized(self._prompt + kept, rendering, closing)

    def _special(self, token_id: int) -> str:
        """Return the special token of this id; "" for an ordinary token, and for an image token."""
        specials, images = self._tokenizer.tokenizer.special_tokens, self._tokenizer.images
        if images is not None and token_id == images.image_token_id:
            return ""
        return next((text for text, id in specials.items() if id == token_id), "")

    def _fitting(self) -> tuple[TokenIds, str]:
        """Return ids of exactly the output's text, and the special token at their end, if there is one.

        They are the output's own ids, except at the end of an output that a stop string cut within a token.
        """
        output, text = self._output, self._text
        closing = self._special(output[-1]) if output else ""
        for ids, end in [(output, ""), (output[:-1], closing)] if closing else [(output, "")]:
            for skip in (False, True):
                if self._tokenizer.decode(ids, skip_special_tokens=skip) == text and (end or not (closing and skip)):
                    return output, end
        count, length = max(self._agreement(skip) for skip in (False, True))
        kept = output[:count]
        kept.extend(self._tokenizer.tokenizer.encode_ordinary(text[length:]))
        return kept, ""

    def _agreement(self, skip: bool) -> tuple[int, int]:
        """Return how many of the ids agree with the text, and the number of their characters."""
        detokenizer = Detokenizer(self._tokenizer.tokenizer, skip_special_tokens=skip)
        agreed, at = (0, 0), 0
        for count, token_id in enumerate(self._output, 1):
            piece = detokenizer.feed((token_id,))
            if not self._text.startswith(piece, at):
                break
            at += len(piece)
            if not detokenizer.is_pending:
                agreed = (count, at)
        return agreed
