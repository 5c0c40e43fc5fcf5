"""The lists of tokens and log-probabilities of completions, for tokenizers of several kinds."""

import math

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from trioengine.serve.chat_response import LEAST
from trioengine.serve.completion_logprobs import CompletionLogprobs, PromptText, name_of
from trioengine.testing import toy_model
from trioengine.text.tokenizer import Tokenizer

BYTES = toy_model().tokenizer  # a token is a byte


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer in SentencePiece's manner: spaces at the front of words, unknown characters as bytes."""
    words = ["▁hello", "▁world", "a", "▁a"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: 257 + index for index, word in enumerate(words)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw)


def lists(tokenizer, *, as_ids=False, offset=0):
    return CompletionLogprobs(tokenizer, as_ids=as_ids, skip_special_tokens=True, offset=offset)


def test_names(sentencepiece):
    assert [name_of(byte, BYTES) for byte in (0x61, 0x0A, 0x00, 0xC3)] == ["a", "\n", "\x00", "bytes:\\xc3"]
    assert name_of(BYTES.special_tokens["<|im_end|>"], BYTES) == "<|im_end|>"
    found = [name_of(id, sentencepiece) for id in (257, 259, 0x61 + 1, 0xC3 + 1)]
    assert found == [" hello", "a", "a", "bytes:\\xc3"]


def test_of_tokens_with_one_name_the_best_is_shown(sentencepiece):
    """So that a reader who compares a token with the maximum does not take it for the best."""
    position = {98: -3.0, 259: -1.0, 257: -2.0}  # the token itself comes first; two have the text "a"
    found = lists(sentencepiece).answer([98], [position])
    assert found["token_logprobs"] == [-3.0]
    assert list(found["top_logprobs"][0].items()) == [("a", -1.0), (" hello", -2.0)]
    found = lists(sentencepiece, as_ids=True).answer([98], [position])
    assert found["top_logprobs"] == [{"token_id:259": -1.0, "token_id:257": -2.0, "token_id:98": -3.0}]


def test_minus_infinity_is_a_number():
    found = lists(BYTES).answer([97], [{97: -math.inf, 98: -0.5}])
    assert found["token_logprobs"] == [LEAST]
    assert found["top_logprobs"] == [{"b": -0.5, "a": LEAST}]


def test_offsets_of_pieces():
    """A token within a character has the offset of the character, wherever the answer is cut into pieces."""
    ids = list("aé😀b".encode())
    positions = [{id: -1.0} for id in ids]
    expected = [7, 8, 8, 9, 9, 9, 9, 10]
    for cut in range(len(ids) + 1):
        rendered = lists(BYTES, offset=7)
        pieces = [rendered.answer(ids[part], positions[part]) for part in (slice(cut), slice(cut, None))]
        assert [offset for piece in pieces for offset in piece["text_offset"]] == expected


def test_offsets_of_a_text_with_special_tokens_around_it(sentencepiece):
    """The tokens before it have the offset 0, and the tokens behind it that of its end."""
    start, end = BYTES.special_tokens["<|im_start|>"], BYTES.special_tokens["<|im_end|>"]
    ids = [start, *b"ab", start, *b"c", end, end]
    positions = [None, *({id: -1.0} for id in ids[1:])]
    text = "ab<|im_start|>c"
    found = lists(BYTES).prompt(PromptText(text, 1), ids, positions)
    assert found["text_offset"] == [0, 0, 1, 2, 14, 15, 15]
    assert (found["tokens"][0], found["token_logprobs"][0], found["top_logprobs"][0]) == ("<|im_start|>", None, None)
    ids = [257, 258, 0xC3 + 1, 0xA9 + 1, 259]
    positions = [None, *({id: -1.0} for id in ids[1:])]
    found = lists(sentencepiece).prompt(PromptText("hello worldéa"), ids, positions)
    assert found["text_offset"] == [0, 5, 11, 11, 12]
