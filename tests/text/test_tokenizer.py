"""Token ids equal the reference's, and no content becomes a special token."""

import json
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from trioengine import ModelError
from trioengine.hub.model_info import read_model
from trioengine.testing import toy_model
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_reference.json").read_text())


@pytest.fixture(scope="module")
def model(smollm2):
    return read_model(smollm2)


@pytest.fixture(scope="module")
def chat(model):
    return ChatTokenizer(model.tokenizer, model.chat_template)


def test_texts_that_come_again_have_the_same_ids(chat):
    """The ids of short texts are kept, and what a caller does with the result does not change them."""
    tokenizer, rendering = chat.tokenizer, "<|im_start|>user\nhello there<|im_end|>\n"
    first = tokenizer.encode_pieces(rendering, str)
    expected = first.tolist()
    assert expected == tokenizer.encode(rendering)
    first.reverse()
    tokenizer.encode_ordinary("user\nhello there").clear()
    assert tokenizer.encode_pieces(rendering, str).tolist() == expected
    assert tokenizer.encode_pieces("x" * 5000, str).tolist() == tokenizer.encode("x" * 5000)
    assert tokenizer.encode_pieces("", str).tolist() == []


@pytest.mark.parametrize("entry", REFERENCE["texts"], ids=lambda entry: ascii(entry["text"])[:40])
def test_texts_have_the_reference_ids(chat, entry):
    assert chat.encode(entry["text"]) == entry["ids"]
    assert chat.tokenizer.encode_ordinary(entry["text"]) == entry["ordinary"]
    assert chat.decode(entry["ids"], skip_special_tokens=False) == entry["text"]
    assert list(chat.encode_rendering(chat.protect(entry["text"]))) == entry["ordinary"]


@pytest.mark.parametrize("entry", REFERENCE["conversations"], ids=["one", "system", "three", "empty"])
def test_conversations_have_the_reference_ids(chat, entry):
    assert chat.apply_chat_template(entry["messages"]) == entry["ids"]


@pytest.mark.parametrize("entry", REFERENCE["texts"], ids=lambda entry: ascii(entry["text"])[:40])
def test_contents_never_become_special(chat, entry):
    ids = chat.apply_chat_template([{"role": "user", "content": entry["text"]}])
    empty = chat.apply_chat_template([{"role": "user", "content": ""}])
    special = chat.tokenizer.special_ids
    assert [id for id in ids if id in special] == [id for id in empty if id in special]
    assert entry["text"] in chat.decode(ids, skip_special_tokens=False)


@given(st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_ordinary_text(chat, text):
    ids = chat.encode_rendering(chat.protect(text))
    assert list(ids) == chat.tokenizer.encode_ordinary(text)
    assert not chat.tokenizer.special_ids & set(ids)


@given(st.text(st.sampled_from("a\U00100000\U00100001\U0010fffc\U0010fffd<|im_end|>")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_private_use_characters_come_back(chat, text):
    ids = chat.encode_rendering(chat.protect(text))
    assert chat.decode(ids, skip_special_tokens=False) == text


BYTES = toy_model().tokenizer


def metadata(**changes):
    tokens = [token for token, _ in sorted(BYTES._tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "12", "123", "1234", "<user>"],
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1] * 3 + [4],
    } | changes


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
    ],
)
def test_tokenizer_ggml_pre_decides_the_splitting(pre, pieces):
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.pre": pre}))
    assert [tokenizer.decode([id]) for id in tokenizer.encode("1234")] == pieces
    assert tokenizer.encode("<user>") == tokenizer.encode_ordinary("<user>") == [262]
    assert set(tokenizer.special_tokens) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


GPT2_DIGITS = ["HelloWorld", "'s", " ", "1", "2", "3", "4", "5", " /", "\n ", " x"]
LLAMA3_DIGITS = ["HelloWorld", "'s", " ", "123", "45", " /\n", " ", " x"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("dbrx", LLAMA3_DIGITS),
        ("default", ["HelloWorld", "'", "s", " ", "123", "45", " ", "/", "\n ", " x"]),
        ("gpt-2", ["HelloWorld", "'s", " 12345", " /", "\n ", " x"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "45", " /\n", " ", " x"]),
        ("lfm2", LLAMA3_DIGITS),
        ("llama-bpe", LLAMA3_DIGITS),
        ("llama-v3", LLAMA3_DIGITS),
        ("olmo", ["HelloWorld", "'s", " 12345", " /", "\n ", " x"]),
        ("qwen2", ["HelloWorld", "'s", " ", "1", "2", "3", "4", "5", " /\n", " ", " x"]),
        ("qwen35", ["HelloWorld", "'s", " ", "1", "2", "3", "4", "5", " /\n", " ", " x"]),
        ("refact", GPT2_DIGITS),
        ("seed-coder", ["HelloWorld", "'s", " ", "1", "2", "3", "4", "5", " /", "\n", " ", " x"]),
        ("smaug-bpe", LLAMA3_DIGITS),
        ("smollm", GPT2_DIGITS),
        ("starcoder", GPT2_DIGITS),
        ("tekken", ["Hello", "World", "'s", " ", "1", "2", "3", "4", "5", " /\n", " ", " x"]),
    ],
)
def test_tokenizer_ggml_pre_decides_the_words(pre, pieces):
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.pre": pre}))._tokenizer
    text = "HelloWorld's 12345 /\n  x"
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in words] == pieces


@pytest.mark.parametrize(
    ("pre", "is_whole"), [("lfm2", True), ("llama-v3", True), ("tekken", True), ("dbrx", False), ("gpt-4o", False)]
)
def test_a_word_that_no_merge_makes(pre, is_whole):
    tokens = [*metadata()["tokenizer.ggml.tokens"], "word"]
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}))
    assert tokenizer.encode("word") == ([263] if is_whole else [*b"word"])


def test_qwen35_keeps_marks_with_their_letters():
    text = "e\u0323x \u0323!"
    for pre, pieces in (("qwen2", ["e", "\u0323x", " \u0323!"]), ("qwen35", ["e\u0323x", " \u0323", "!"])):
        splitter = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.pre": pre}))._tokenizer.pre_tokenizer
        assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == pieces


def test_qwen2_normalizes():
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.pre": "qwen2"}))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'.*supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.model": ["llama"]}, "tokenizer.ggml.model is .*supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.pre": "viking"}, "'viking'.*llama-bpe"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not a pair"),
        ({"tokenizer.ggml.merges": ["x nothere"]}, "tokenizer.ggml.merges"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(change, why):
    with pytest.raises(ModelError, match=why):
        Tokenizer.from_gguf(metadata(**change))


def test_a_tokenizer_json_without_a_tokenizer():
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_json("{}")


def test_unknown_ids_have_no_text():
    assert BYTES.bytes_of([10_000]) == BYTES.ordinary_bytes[10_000] == b""
    assert BYTES.bytes_of([97, 10_000, 98]) == b"ab"
    assert BYTES.max_token_bytes >= len("<|endoftext|>")


def test_a_vocabulary_with_holes_and_with_more_than_the_model_knows():
    raw = RawTokenizer(models.BPE(vocab={"a": 0, "b": 1, "d": 3, "far": 200_000_000}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_json(raw.to_str(), vocab_size=4)
    assert tokenizer.bytes_of([0, 2, 3, 200_000_000, 5, 1]) == b"adb"
    assert tokenizer.vocab_size == 4


LONG_IDS = [*b"hello world "] * 50_000


@pytest.mark.parametrize(
    ("function", "argument", "result"),
    [
        (BYTES.encode, bytes(LONG_IDS).decode(), LONG_IDS),
        (BYTES.decode, LONG_IDS, bytes(LONG_IDS).decode()),
    ],
    ids=["encode", "decode"],
)
def test_other_threads_run_while_long_inputs_are_converted(function, argument, result):
    """Its long calls would otherwise hold the interpreter's lock, and stop the event loop."""
    results, turns = [], 0
    thread = threading.Thread(target=lambda: results.append(function(argument)))
    thread.start()
    while thread.is_alive():
        time.sleep(0)  # yields the GIL; a call that never releases it leaves no turn
        turns += 1
    thread.join()
    assert results == [result]
    assert turns > 100


@given(st.text(min_size=5, max_size=20), st.integers(1, 900))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_long_inputs_are_converted_like_short_ones(model, text, count):
    """By the same underlying calls that are made for a short one."""
    text *= count
    raw = model.tokenizer._tokenizer
    ids = model.tokenizer.encode_ordinary(text)
    assert ids == raw.encode(text, add_special_tokens=False).ids
    assert model.tokenizer.decode(ids) == raw.decode(ids)
