"""Log-probabilities in OpenAI's shape: an entry for each token, the end token too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioengine.core.types import Logprobs
from trioengine.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def logprobs_content(logprobs: Iterable[Logprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokens, each with the `top` best of its position, best first."""
    return [_position(position, top, tokenizer) for position in logprobs]


def _position(position: Logprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    chosen = next(iter(position))
    best = sorted(position, key=position.__getitem__, reverse=True)[:top]
    alternatives = [_token(token_id, position[token_id], tokenizer) for token_id in best]
    return {**_token(chosen, position[chosen], tokenizer), "top_logprobs": alternatives}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.is_byte_level:
        data = tokenizer.bytes_of((token_id,))
        text = data.decode(errors="replace")
    else:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        data = text.encode()
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}
