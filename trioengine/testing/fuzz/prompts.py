"""The prompt that a conversation must become, found in the simplest way."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from trioengine.testing.fuzz.callers import Reader
from trioengine.testing.fuzz.pictures import PICTURES, Content, Shown, Turn, content_of
from trioengine.testing.toy_model import toy_model
from trioengine.testing.toy_vision import TOY_PROCESSING, ToyImage
from trioengine.text.chat_tokenizer import ChatTokenizer

_PLACES = dict(enumerate(PICTURES.values(), 14))  # by a byte that no text has
_BYTES = {name: chr(place) for place, name in zip(_PLACES, PICTURES, strict=True)}


class FuzzPrompt(NamedTuple):
    """A prompt's token ids, and its images: where their tiles begin, and their bytes."""

    token_ids: tuple[int, ...]
    images: tuple[ToyImage, ...]


@lru_cache(maxsize=1 << 14)
def prompt_of(turns: tuple[Turn, ...]) -> FuzzPrompt:
    """The whole conversation rendered and tokenized at once, which the engine never does."""
    model = toy_model()
    tokenizer = ChatTokenizer(model.tokenizer, model.chat_template)
    messages = [{"role": role, "content": _marked(content)} for role, content in turns]
    ids: list[int] = []
    images: list[ToyImage] = []
    for token_id in tokenizer.apply_chat_template(messages):
        if token_id not in _PLACES:
            ids.append(token_id)
            continue
        starts = []
        for _ in range(TOY_PROCESSING.num_tiles(*_PLACES[token_id].size)):
            starts.append(len(ids) + 1)
            ids += [ord("["), *[TOY_PROCESSING.image_token_id] * TOY_PROCESSING.tokens_per_tile]
        ids.append(ord("]"))
        images.append((tuple(starts), _PLACES[token_id].data))
    return FuzzPrompt(tuple(ids), tuple(images))


def _marked(content: Content) -> str:
    """A byte in the place of each picture."""
    if isinstance(content, Shown):
        return "".join(_BYTES[name] for name in content.pictures) + content.text
    return content


def prompt_ids(turns: tuple[Turn, ...]) -> tuple[int, ...]:
    """The token ids of `prompt_of`."""
    return prompt_of(turns).token_ids


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
    holder, turns = reader.holder, (*turns, ("user", content_of(reader.media, reader.prompt)))
    if holder.overflow == "refuse":
        return turns, 0
    max_tokens = reader.params.max_tokens
    assert max_tokens is not None, "the machine's requests are for so many"
    return shortened(turns, holder.engine.limits.max_model_len, max_tokens)
