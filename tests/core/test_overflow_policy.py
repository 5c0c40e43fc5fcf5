"""The policy for a chat that outgrows the context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine import RequestRejected
from trioengine.core.sampling_params import check_overflow, prompt_limit, retained


def test_the_policies_have_these_names():
    assert [check_overflow(name) for name in ("refuse", "drop_oldest_turns")] == ["refuse", "drop_oldest_turns"]


@pytest.mark.parametrize("overflow", ["drop", "", None, True, ["refuse"]])
def test_another_policy_is_refused(overflow):
    with pytest.raises(RequestRejected, match="overflow must be 'refuse' or 'drop_oldest_turns', got") as refused:
        check_overflow(overflow)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "overflow")


@pytest.mark.parametrize(("max_tokens", "limit"), [(None, 384), (1, 511), (100, 412), (256, 256), (9999, 256)])
def test_there_is_room_for_the_answer(max_tokens, limit):
    assert prompt_limit(512, max_tokens) == limit


@given(limit=st.integers(0, 2**31 - 1), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_ratio_of_the_limit_is_retained(limit, low, high):
    low, high = sorted((low, high))
    assert 0 <= retained(limit, low) <= retained(limit, high) <= limit
    assert retained(limit, low) <= limit * low < retained(limit, low) + 1
    assert (retained(limit, 0), retained(limit, 1)) == (0, limit)
