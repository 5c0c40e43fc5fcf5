"""The model's answers, computed from the whole history; an answer of the engine is compared with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.testing.fuzz.image_oracles import check_seen
from trioengine.testing.toy_model import IM_END, toy_answer, toy_next, toy_value, toy_weights
from trioengine.testing.toy_vision import TOY_TILE, ToyImage, toy_embeddings


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
