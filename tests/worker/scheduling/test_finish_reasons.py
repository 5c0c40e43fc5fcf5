"""Every way for a sequence to finish by itself."""

from __future__ import annotations

from helpers.toy_driver import answer, finish, next_token, params

from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason
from trioengine.testing.toy_model import IM_END as EOS
from trioengine.testing.toy_model import VOCAB_SIZE


def prompt_before_eos(num_tokens: int) -> list[int]:
    """A prompt whose answer has its first end token as token number `num_tokens`."""
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            tokens = answer([first, second], ResolvedParams(max_tokens=num_tokens + 1, seed=1), 64)
            if len(tokens) == num_tokens and tokens[-1] == EOS:
                return [first, second]
    raise AssertionError("no such prompt")


def test_the_end_token_stops() -> None:
    reason, tokens = finish(prompt_before_eos(3), params(9, ignore_eos=False))
    assert (reason, len(tokens), tokens[-1]) == (FinishReason.STOP, 3, EOS)


def test_the_end_token_is_ignored_when_asked() -> None:
    reason, tokens = finish(prompt_before_eos(3), params(9))
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 9)


def test_the_end_token_before_min_tokens_does_not_stop() -> None:
    _, tokens = finish(prompt_before_eos(3), params(5, ignore_eos=False, min_tokens=4))
    assert tokens[2] == EOS
    assert len(tokens) > 3
    assert finish(prompt_before_eos(3), params(5, ignore_eos=False, min_tokens=3)) == (FinishReason.STOP, tokens[:3])


def test_the_end_token_as_the_last_one_allowed_is_a_stop() -> None:
    reason, _ = finish(prompt_before_eos(3), params(3, ignore_eos=False))
    assert reason is FinishReason.STOP


def test_stop_token_ids_stop_even_when_the_end_token_is_ignored() -> None:
    second = next_token([1, 2, next_token([1, 2])])
    reason, tokens = finish([1, 2], params(30, stop_token_ids=(second,)))
    assert reason is FinishReason.STOP
    assert tokens[-1] == second
    assert len(tokens) <= 2


def test_max_model_len_is_a_length() -> None:
    reason, tokens = finish([1, 2, 3], params(100), max_model_len=10)
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 7)


def test_the_kv_cache_bounds_the_length() -> None:
    reason, tokens = finish([1, 2, 3], params(100), kv_blocks_total=2)
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 5)
