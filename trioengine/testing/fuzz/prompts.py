"""The prompt that a conversation must become, found in the simplest way."""

from __future__ import annotations

from functools import lru_cache

from trioengine.testing.fuzz.callers import Reader, Turn
from trioengine.testing.toy_model import toy_model
from trioengine.text.chat_tokenizer import ChatTokenizer


@lru_cache(maxsize=1 << 14)
def prompt_ids(turns: tuple[Turn, ...]) -> tuple[int, ...]:
    """The whole conversation rendered and tokenized at once, which the engine never does."""
    model = toy_model()
    tokenizer = ChatTokenizer(model.tokenizer, model.chat_template)
    return tuple(tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in turns]))


def shortened(turns: tuple[Turn, ...], max_model_len: int, max_tokens: int) -> tuple[tuple[Turn, ...], int]:
    """The messages without the fewest oldest turns, so that there is room for the answer; and how many these are.

    Without all but the newest turn, where there is no such number.
    """
    first = next((index for index, (role, _) in enumerate(turns) if role != "system"), len(turns))
    starts = [index for index, (role, _) in enumerate(turns) if index == first or (index > first and role == "user")]
    kept = [(*turns[:first], *turns[start:]) for start in starts] or [turns]
    room = min(max_tokens, max_model_len // 2)
    fitting = (count for count, each in enumerate(kept) if len(prompt_ids(each)) + room <= max_model_len)
    count = next(fitting, len(kept) - 1)
    return kept[count], count


def asked(reader: Reader, turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], int]:
    """The conversation with the prompt of the request, and how many of the oldest turns it had to drop."""
    holder, turns = reader.holder, (*turns, ("user", reader.prompt))
    if holder.overflow == "refuse":
        return turns, 0
    max_tokens = reader.params.max_tokens
    assert max_tokens is not None, "the machine's requests are for so many"
    return shortened(turns, holder.engine.limits.max_model_len, max_tokens)
