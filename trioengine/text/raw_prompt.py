"""Prompts without a chat template: texts, with the special tokens that the tokenizer adds, and token ids."""

from __future__ import annotations

from collections.abc import Sequence

from trioengine.core.checks import check_unicode, rejected
from trioengine.core.errors import RequestRejected
from trioengine.core.messages import Ready
from trioengine.core.sampling_params import check_room
from trioengine.core.wording import brief
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import check_length


def raw_token_ids(
    prompt: str | Sequence[int], name: str, tokenizer: ChatTokenizer, limits: Ready, max_tokens: int | None
) -> list[int]:
    """Return the token ids of a prompt, which the engine will take. Raises RequestRejected, with this name."""
    try:
        check_length(prompt, limits.max_model_len, tokenizer)
    except RequestRejected as exc:
        raise RequestRejected(exc.code, exc.message.replace("prompt", name, 1), param=name) from None
    if isinstance(prompt, str):
        check_unicode(prompt, name)
        ids = tokenizer.tokenizer.surrounded(tokenizer.encode(prompt))
    else:
        ids = list(prompt)
    if not ids:
        raise RequestRejected("empty_prompt", f"{name} is empty", param=name)
    check_room(len(ids), limits.max_model_len, max_tokens, name)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < limits.vocab_size:
            raise rejected(name, f"must hold token ids from 0 to {limits.vocab_size - 1}, got {brief(token_id)}")
    return ids
