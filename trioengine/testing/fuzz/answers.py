"""The toy model's prompts and answers, computed from the whole history, to compare the engine's answers with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from trioengine.core.completion import Completion
from trioengine.core.messages import FinishReason
from trioengine.core.outcome import Cause
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz.pictures import PICTURES, Content, Shown, Turn, check_seen
from trioengine.testing.toy_model import (
    IM_END,
    TOY_PROCESSING,
    TOY_TILE,
    ToyImage,
    toy_answer,
    toy_embeddings,
    toy_model,
    toy_next,
    toy_value,
    toy_weights,
)
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


def check_answer(
    completion: Completion,
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_model_len: int,
    causes: AbstractSet[Cause],
    paths: Sequence[str],
    images: tuple[ToyImage, ...] = (),
) -> None:
    """It is the model's; or an abort, by one of the causes that there were, with a part of the model's."""
    room = max_model_len - len(prompt)
    versions, ids, text = completion.weight_versions, completion.token_ids, completion.text
    assert bool(versions) == bool(ids) and list(versions) == sorted(set(versions)), f"{ids} of the weights {versions}"
    weights = [toy_weights(paths[version]) for version in versions]
    if len(set(weights)) > 1:
        check_mixed(ids, prompt, weights, images)
        return
    if ids:
        check_seen(images)
    length = min(room, params.max_tokens or room)
    expected = reference(prompt, length, params.stop, *weights[:1], ignore_eos=params.ignore_eos, images=images)
    if completion.finish_reason is FinishReason.ABORT:
        assert completion.cause in causes, f"aborted by {completion.cause}, there were {causes or 'no causes'}"
        assert not ids or ids != expected.token_ids, f"the whole answer {text!r} came, and is an abort"
        assert expected.token_ids[: len(ids)] == ids, f"{ids} is no part of the model's answer {expected.token_ids}"
        assert expected.text.startswith(text), f"{text!r} is no part of the model's answer {expected.text!r}"
        return
    assert ids == expected.token_ids, f"the answer is {ids}, the model's is {expected.token_ids}"
    assert text == expected.text, f"the answer is {text!r}, the model's is {expected.text!r}"
    assert completion.finish_reason is expected.finish_reason, f"{completion.finish_reason}, not {expected}"
    assert completion.cause is None, "only an abort has a cause"
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ids)), f"counted wrongly: {usage}"


class Answer:
    """The model's answer."""

    def __init__(self, token_ids: tuple[int, ...], text: str, finish_reason: FinishReason) -> None:
        self.token_ids, self.text, self.finish_reason = token_ids, text, finish_reason


def check_mixed(
    ids: tuple[int, ...], prompt: tuple[int, ...], weights: Sequence[int], images: tuple[ToyImage, ...]
) -> None:
    """Each token is that of the weights that there were then; they changed on the way, in this order."""
    possible = {0}  # which of the weights the latest token may be of
    for at, token in enumerate(ids):
        history = (*prompt, *ids[:at])
        fits = [index for index, each in enumerate(weights) if _next(history, each, images) == token]
        possible = {index for index in fits if index >= min(possible)}
        assert possible, f"{ids[at:]} after {at} tokens is of none of the weights that there were"


@lru_cache(maxsize=1 << 12)
def _next(history: tuple[int, ...], weights: int, images: tuple[ToyImage, ...]) -> int:
    values = array("L")
    embedded = toy_embeddings(images, TOY_TILE.num_tokens, weights)
    for position, token_id in enumerate(history):
        values.append(toy_value(embedded.get(position, token_id), values[-1] if values else weights))
    return toy_next(values)


@lru_cache(maxsize=1 << 14)
def reference(
    prompt: tuple[int, ...],
    max_tokens: int,
    stop: tuple[str, ...],
    weights: int = 0,
    *,
    ignore_eos: bool = False,
    images: tuple[ToyImage, ...] = (),
) -> Answer:
    length = max(max_tokens, 0)  # a prompt may be longer than the context
    ids = tuple(toy_answer(prompt, length, ignore_eos=ignore_eos, weights=weights, images=images))
    ended = ids[-1:] == (IM_END,) and not ignore_eos
    shown = [at for at, token in enumerate(ids) if token != IM_END]
    text = bytes(ids[at] for at in shown).decode("ascii")  # a token is a character, or hidden
    found = [(shown[text.index(string) + len(string) - 1] + 1, text.index(string)) for string in stop if string in text]
    if found:
        taken, cut = min(found)
        return Answer(ids[:taken], text[:cut], FinishReason.STOP)
    return Answer(ids, text, FinishReason.STOP if ended else FinishReason.LENGTH)
