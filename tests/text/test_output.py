"""The text of an output, and the stop string that ends it."""

from hypothesis import given
from hypothesis import strategies as st

from trioengine import SamplingParams
from trioengine.core.types import token_ids
from trioengine.testing import toy_model
from trioengine.text.output import OutputText

BYTES = toy_model().tokenizer  # a token is a byte


def read(text, **params):
    """The text, and whether a stop string was completed."""
    output = OutputText(BYTES, SamplingParams(max_tokens=100, **params), ())
    for token_id in text.encode():
        if output.feed(token_ids([token_id])):
            return output.text, True
    stopped = output.finish(token_ids(), ended_by_token=False)
    return output.text, stopped


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    for min_tokens in range(6):
        assert read("say stop", stop="y s", min_tokens=min_tokens) == ("sa", True)
    for min_tokens in (6, 7, 8):
        assert read("say stop", stop="y s", min_tokens=min_tokens) == ("say stop", False)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_the_first_stop_string_to_end_at_min_tokens_or_later(text, stops, min_tokens):
    ends = [
        (end, start) for end in range(min_tokens, len(text) + 1) for start in range(end) if text[start:end] in stops
    ]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert read(text, stop=tuple(stops), min_tokens=min_tokens) == expected
