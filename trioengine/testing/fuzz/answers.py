"""The toy model's answers in fuzzed programs: the reference, by arithmetic of its own, and checks against it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.testing.fuzz.conversations import check_seen
from trioengine.testing.fuzz.grammars import is_bad, is_complete
from trioengine.testing.fuzz.tools import Offered, parts_in, parts_of_answer
from trioengine.testing.toy_grammar import ToyFollower
from trioengine.testing.toy_model import (
    END_OF_TEXT,
    IM_END,
    TOY_TILE,
    ToyImage,
    toy_answer,
    toy_embeddings,
    toy_logprobs,
    toy_next,
    toy_value,
)
from trioengine.testing.toy_weights import toy_adapted, toy_weights

EOS = frozenset({IM_END, END_OF_TEXT})


def check_answer(
    completion: Completion,
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_model_len: int,
    causes: AbstractSet[Cause],
    paths: Sequence[str],
    images: tuple[ToyImage, ...] = (),
    tools: Offered | None = None,
    adapter: str | None = None,
) -> None:
    """It is the model's; or an abort, by one of the causes that there were, with a part of the model's.

    With tools it is divided into text and calls. `adapter` is the path of the session's adapter.
    """
    room = max_model_len - len(prompt)
    versions, ids, text = completion.weight_versions, completion.token_ids, completion.text
    assert bool(versions) == bool(ids) and list(versions) == sorted(set(versions)), f"{ids} of the weights {versions}"
    weights = [toy_weights(paths[version]) for version in versions]
    length = min(room, params.max_tokens or room)
    if len(set(weights)) > 1:
        check_mixed(completion, prompt, weights, images, params, min(params.min_tokens, length), tools, adapter)
        return
    assert not (ids and is_bad(params.grammar)), f"its grammar cannot be compiled, and it is answered: {text!r}"
    if ids:
        check_seen(images)
    expected = reference(
        prompt,
        length,
        params.stop,
        *weights[:1],
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        images=images,
        grammar=None if is_bad(params.grammar) else params.grammar,
        adapter=adapter,
    )
    check_logprobs(completion, params)
    if completion.finish_reason is FinishReason.ABORT:
        assert completion.cause in causes, f"aborted by {completion.cause}, there were {causes or 'no causes'}"
        assert not ids or ids != expected.token_ids, f"the whole answer {text!r} came, and is an abort"
        assert expected.token_ids[: len(ids)] == ids, f"{ids} is not part of the model's answer {expected.token_ids}"
        check_parts(completion, "".join(chr(token) for token in ids if token < END_OF_TEXT), tools)
        assert completion.usage.completion_tokens == len(ids), f"{len(ids)} tokens are counted as {completion.usage}"
        return
    assert ids == expected.token_ids, f"the answer is {ids}, the model's is {expected.token_ids}"
    check_parts(completion, expected.text, tools)
    has_called = completion.tool_calls and expected.finish_reason is FinishReason.STOP
    reason = FinishReason.TOOL_CALLS if has_called else expected.finish_reason
    assert completion.finish_reason is reason, f"{completion.finish_reason}, not {reason}: {expected}"
    assert completion.cause is None, "only an abort has a cause"
    assert not is_bad(params.grammar), "its grammar cannot be compiled, and it has an answer"
    check_complete(completion, params, tools)
    usage, due = completion.usage, (len(prompt), len(ids))
    counted = usage.prompt_tokens, usage.completion_tokens
    assert counted == due, f"{counted} tokens of prompt and answer are counted, there are {due}: {usage}"


def check_parts(completion: Completion, answer: str, tools: Offered | None) -> None:
    """The model's answer gives this text and these calls; the end of an abort is left out where it must be."""
    found = parts_in(completion.text, completion.tool_calls)
    is_aborted = completion.finish_reason is FinishReason.ABORT
    due = parts_of_answer(tools, answer, is_aborted=is_aborted)
    name = "the text of an abort" if is_aborted else "the answer"
    assert found == due, f"{name} is {found}, the model's is {due}, of {answer!r}"


def check_complete(completion: Completion, params: SamplingParams, tools: Offered | None) -> None:
    """An answer that was not cut by a limit, a stop string or a stop token is complete by its grammar."""
    if params.grammar is None or completion.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return
    ids = completion.token_ids
    text = bytes(token for token in ids if token < END_OF_TEXT).decode("ascii")
    if ids[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
        return
    if tools is not None:
        tools.check_complete(text)
    else:
        assert is_complete(params.grammar, text), f"{text!r} has ended, and is not complete by its grammar"


def check_logprobs(completion: Completion, params: SamplingParams) -> None:
    """Each token has its logprobs, if they were asked for, and none has any if not."""
    found, top = completion.logprobs, params.logprobs
    due = None if top is None else tuple(toy_logprobs(token, top) for token in completion.token_ids)
    assert found == due, f"the logprobs of {completion.token_ids} are {found}, the model's are {due}"


class Answer(NamedTuple):
    """The model's answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def check_mixed(
    completion: Completion,
    prompt: tuple[int, ...],
    weights: Sequence[int],
    images: tuple[ToyImage, ...],
    params: SamplingParams,
    min_tokens: int,
    tools: Offered | None,
    adapter: str | None,
) -> None:
    """Check that each token comes from the weights of its time; these changed on the way, in this order."""
    ids = completion.token_ids
    possible = {0}  # which of the weights the latest token may be of
    follower = None if params.grammar is None else ToyFollower(params.grammar)
    ends = EOS.union(params.stop_token_ids)
    for at, token in enumerate(ids):
        history = (*prompt, *ids[:at])
        drawn = [_next(history, each, images, adapter) for each in weights]
        if follower is not None:
            assert not follower.is_complete, f"{ids} is complete by its grammar after {at} tokens, and goes on"
            drawn = [follower.replacement(each, ends if at < min_tokens else ()) for each in drawn]
            follower.take(token)
        fits = [index for index, each in enumerate(drawn) if each == token]
        possible = {index for index in fits if index >= min(possible)}
        assert possible, f"{ids[at:]} after {at} tokens is of none of the weights that there were"
    check_complete(completion, params, tools)
    if tools is not None and not params.stop:
        is_stopped = completion.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        is_hidden = is_stopped and ids[-1] in params.stop_token_ids
        shown = ids[:-1] if is_hidden else ids
        check_parts(completion, "".join(chr(token) for token in shown if token < END_OF_TEXT), tools)


@lru_cache(maxsize=1 << 12)
def _next(history: tuple[int, ...], weights: int, images: tuple[ToyImage, ...], adapter: str | None) -> int:
    values = array("L")
    embedded, first = toy_embeddings(images, TOY_TILE.num_tokens, weights), toy_adapted(weights, adapter)
    for position, token_id in enumerate(history):
        values.append(toy_value(embedded.get(position, token_id), values[-1] if values else first))
    return toy_next(values)


def _is_whole(grammar: Grammar, ids: tuple[int, ...]) -> bool:
    follower = ToyFollower(grammar)
    for token_id in ids:
        follower.take(token_id)
    return follower.is_complete


@lru_cache(maxsize=1 << 14)
def reference(
    prompt: tuple[int, ...],
    max_tokens: int,
    stop: tuple[str, ...] = (),
    weights: int = 0,
    *,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    images: tuple[ToyImage, ...] = (),
    grammar: Grammar | None = None,
    seed: int = 0,
    adapter: str | None = None,
) -> Answer:
    """The model's answer, by its own arithmetic: end tokens and stop strings do not end a shorter answer.

    By a grammar it ends where it is complete, which may be earlier.
    """
    length = max(max_tokens, 0) if prompt else 0  # a prompt may be longer than the context
    shortest = min(min_tokens, length)  # where the context ends, an end token counts
    ids = tuple(
        toy_answer(
            prompt,
            length,
            ignore_eos=True,
            weights=weights,
            images=images,
            grammar=grammar,
            unwanted=EOS.union(stop_token_ids),
            min_tokens=shortest,
            seed=seed,
            adapter=adapter,
        )
    )
    end_tokens = {*stop_token_ids} | (set() if ignore_eos else EOS)
    ends = [at + 1 for at, token in enumerate(ids) if token in end_tokens and at + 1 >= shortest]
    if grammar is not None and _is_whole(grammar, ids):
        ends.append(len(ids))
    ids = ids[: min(ends, default=length)]
    is_hidden = bool(ends) and ids[-1] in end_tokens
    shown = [at for at, token in enumerate(ids) if token < END_OF_TEXT and not (is_hidden and at + 1 == len(ids))]
    text = bytes(ids[at] for at in shown).decode("ascii")  # a token is a character, or hidden
    stops = [
        (shown[at + len(string) - 1] + 1, at)
        for string in stop
        for at in range(len(text) - len(string) + 1)
        if text.startswith(string, at) and shown[at + len(string) - 1] + 1 >= min_tokens
    ]
    if stops:
        taken, cut = min(stops)
        return Answer(ids[:taken], text[:cut], FinishReason.STOP)
    return Answer(ids, text, FinishReason.STOP if ends else FinishReason.LENGTH)
