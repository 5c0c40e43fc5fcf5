"""The text of an output, complete however its ids are divided, and the stop string that ends it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from trioengine import SamplingParams
from trioengine.core.types import token_ids
from trioengine.hub.model_info import read_model
from trioengine.testing import toy_model
from trioengine.text.output import Detokenizer, OutputText
from trioengine.text.stop_strings import StopMatcher
from trioengine.text.tokenizer import Tokenizer

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


@pytest.fixture(scope="module")
def model(smollm2):
    return read_model(smollm2)


@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans(), st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_detokenizer_adds_up_to_the_whole(model, ids, skip, step):
    detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
    whole = model.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join([*pieces, detokenizer.flush()]) == whole


def test_no_part_of_a_character_is_given(model):
    detokenizer = Detokenizer(model.tokenizer)
    pieces = [detokenizer.feed((id,)) for id in model.tokenizer.encode("👨‍👩‍👧‍👦 漢字")]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "👨‍👩‍👧‍👦 漢字"


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer in SentencePiece's manner: spaces at the front of words, unknown characters as bytes."""
    words = ["▁hello", "▁world", "a", "▁", "!"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: 257 + index for index, word in enumerate(words)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw)


def test_a_tokenizer_with_byte_fallback(sentencepiece):
    ids = [257, 258, *(byte + 1 for byte in "é😀".encode()), 261, 259]
    detokenizer = Detokenizer(sentencepiece)
    pieces = [detokenizer.feed((id,)) for id in ids]
    assert "".join([*pieces, detokenizer.flush()]) == sentencepiece.decode(ids) == "hello worldé😀!a"
    assert all("\ufffd" not in piece for piece in pieces)


@given(
    st.lists(st.sampled_from("ab"), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_are_found_in_any_pieces(characters, stops):
    """Fed some characters at a time, the first stop to be complete ends the text right before it."""
    text = "".join(characters)
    ends = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    expected = text[: min(ends)[1]] if ends else text
    for step in (1, 3):
        matcher, seen, stopped = StopMatcher(tuple(stops)), "", False
        for at in range(0, len(text), step):
            piece, stopped = matcher.feed(text[at : at + step])
            seen += piece
            if stopped:
                break
        assert stopped == bool(ends)
        assert seen + ("" if stopped else matcher.flush()) == expected
