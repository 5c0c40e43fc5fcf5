"""Random prompts of a given length.

They are made of words that the default model's tokenizer holds as one token each, so that their length is exact for it.
"""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Sequence
from pathlib import Path

from trioengine.hub.known_models import SMOLLM2, trioengine_home
from trioengine.hub.model_info import read_model
from trioengine.text.tokenizer import Tokenizer

_PLAIN = """
air arm art bad bag bed big bit box boy bus buy car cat cold cup cut dark day deep dog door down dry ear east eat egg
end eye face far fast fat fish five fly food foot four full game girl give gold good green hair half hand hard hat
"""
_WORD = re.compile(r" [a-z]+")


class Length(enum.Enum):
    """How long the prompts are."""

    TOKENS = "the default model's tokens"
    WORDS = "words: the default model's tokenizer is not there (trioengine pull)"


class Prompts:
    """A vocabulary to draw prompts from."""

    def __init__(self, words: Sequence[str], length: Length) -> None:
        self.length = length
        self._words = words

    @classmethod
    def find(cls) -> Prompts:
        """By the default model's tokenizer if its file is on this machine; blocks for less than a second."""
        path: Path = trioengine_home() / SMOLLM2.location
        if not path.is_file():
            return cls([f" {word}" for word in _PLAIN.split()], Length.WORDS)
        model = read_model(path)
        return cls(_single_tokens(model.tokenizer, model.vocab_size), Length.TOKENS)

    def draw(self, rng: random.Random, length: int) -> str:
        """A prompt of `length` tokens, or words."""
        return "".join(rng.choices(self._words, k=length))


def _single_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Words that stay one token each, whatever they stand beside."""
    words = (tokenizer.decode([id]) for id in range(vocab_size))
    return [word for word in words if _WORD.fullmatch(word) and len(tokenizer.encode(word)) == 1]
