"""SentencePiece tokenizers of GGUF files: ids equal SentencePiece's and llama.cpp's, and texts come back."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trioengine import ModelError
from trioengine.core.grammar import Grammar
from trioengine.text.grammar import Compiler
from trioengine.text.output import Detokenizer
from trioengine.text.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "sentencepiece_reference.json").read_text())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = "the rain in spain stays mainly in the plain, and naïve cafés are in the rain: banana ananas aaaaaaaa    ä"
PARTS = [*sorted(set(CORPUS)), "é", "😀", "\n", "<s>", "</s>", "<b>", "<0x41>", "the", " rain", "ana", "aaa"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def trained(count):
    """Pieces and scores as SentencePiece's trainer makes them: each joins the most frequent pair of the corpus."""
    symbols = list(CORPUS.replace(" ", "▁"))
    pieces = []
    while len(pieces) < count:
        pairs = Counter(pairwise(symbols))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        symbols = merged(symbols, left, right)
        if left + right not in pieces:
            pieces.append(left + right)
    pieces += sorted(set(CORPUS.replace(" ", "▁")))
    return [(piece, -float(rank), NORMAL) for rank, piece in enumerate(pieces)]


def merged(symbols, left, right):
    done = []
    for symbol in symbols:
        if symbol == right and done and done[-1] == left:
            done[-1] += symbol
        else:
            done.append(symbol)
    return done


ROWS = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("<b>", -1000.0, USER_DEFINED),
    *trained(50),
]
IDS = {token: id for id, (token, _, _) in enumerate(ROWS)}
PIECES = {token: score for token, score, kind in ROWS if kind == NORMAL}


def metadata(rows=ROWS, **changes):
    tokens, scores, types = (list(column) for column in zip(*rows, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


LLAMA, GEMMA = Tokenizer.from_gguf(metadata()), Tokenizer.from_gguf(metadata(add_space_prefix=False))


def slowly(text, *, prefix):
    """SentencePiece's algorithm: merge the pair of neighbours that makes the best piece, the leftmost of equals."""
    ids = []
    for index, run in enumerate(text.split("<b>")):
        ids += [IDS["<b>"]] * (index > 0)
        symbols = list(("▁" * prefix + run.replace(" ", "▁")) if run else "")
        while True:
            scores = {at: PIECES.get(left + right) for at, (left, right) in enumerate(pairwise(symbols))}
            best = max((score for score in scores.values() if score is not None), default=None)
            if best is None:
                break
            at = next(at for at, score in scores.items() if score == best)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            known = [IDS[symbol]] if symbol in PIECES else [IDS[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            ids += known
    return ids


@pytest.mark.parametrize("entry", REFERENCE["texts"], ids=lambda entry: ascii(entry["text"])[:40])
def test_texts_have_the_reference_ids(gemma, entry):
    tokenizer, numbers = gemma
    assert [numbers[id] for id in tokenizer.encode(entry["text"])] == entry["ids"]
    ordinary = tokenizer.encode_ordinary(entry["text"])
    assert [numbers[id] for id in ordinary] == entry["ordinary"]
    assert tokenizer.decode(ordinary) == entry["text"].replace("▁", " ")


@pytest.fixture(scope="module")
def gemma():
    """The tokens of Gemma 3 that the reference's texts need, and their ids in the whole vocabulary."""
    numbers = [row[0] for row in REFERENCE["vocabulary"]]
    rows = [row[1:] for row in REFERENCE["vocabulary"]]
    return Tokenizer.from_gguf(metadata(rows, add_space_prefix=False)), numbers


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [], []),
        ({"bos_token_id": 1, "eos_token_id": 2}, [1], []),  # llama.cpp's defaults
        ({"bos_token_id": 1, "add_bos_token": False}, [], []),
        ({"bos_token_id": 2, "eos_token_id": 1, "add_eos_token": True}, [2], [1]),
        ({"bos_token_id": 2, "eos_token_id": 1, "add_bos_token": False, "add_eos_token": True}, [], [1]),
        ({"bos_token_id": 2, "add_bos_token": True, "model": "gpt2", "merges": [], "pre": "gpt-2"}, [2], []),
        ({"bos_token_id": 2, "model": "gpt2", "merges": [], "pre": "gpt-2"}, [], []),
        ({"bos_token_id": 2, "model": "gpt2", "merges": [], "pre": "llama-bpe"}, [2], []),
    ],
)
def test_the_tokens_around_a_text(changes, before, after):
    tokenizer = Tokenizer.from_gguf(metadata(**changes))
    assert tokenizer.surroundings == (before, after)
    ids = tokenizer.encode("aa")
    assert tokenizer.surrounded(ids) == [*before, *ids, *after]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false, got 1"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id must be a token id below"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id must be a token id below"),
        ({"add_eos_token": True, "eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id must be a token id below"),
        ({"add_eos_token": True, "eos_token_id": "1"}, "tokenizer.ggml.eos_token_id must be a token id below"),
    ],
)
def test_bad_tokens_around_a_text(changes, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


@given(TEXTS)
def test_ids_are_those_of_the_slow_algorithm(text):
    assert LLAMA.encode_ordinary(text) == slowly(text, prefix=True)
    assert GEMMA.encode_ordinary(text) == slowly(text, prefix=False)


@given(TEXTS)
def test_texts_come_back(text):
    for tokenizer in (LLAMA, GEMMA):
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids)
    assert GEMMA.decode(GEMMA.encode_ordinary(text)) == text
    if "<b>" not in text:
        assert LLAMA.decode(LLAMA.encode_ordinary(text)) == text


@given(st.lists(st.integers(0, len(ROWS) + 1), max_size=30), st.booleans(), st.integers(1, 4))
def test_streamed_pieces_add_up_to_the_whole(ids, skip, step):
    for tokenizer in (LLAMA, GEMMA):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [detokenizer.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
        assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_one_leading_space_is_removed_where_one_is_added():
    ids = [IDS["▁"], IDS["▁"], IDS["a"]]
    assert LLAMA.decode(ids) == " a"
    assert GEMMA.decode(ids) == "  a"
    assert LLAMA.decode([IDS["<s>"], *ids]) == " a"
    assert LLAMA.decode([IDS["<s>"], *ids], skip_special_tokens=False) == "<s>  a"


def test_each_run_of_text_gets_a_space_prefix():
    assert LLAMA.encode("ä<s>ä<b>ä") == [*slowly("ä", prefix=True), 1, *slowly("ä<b>ä", prefix=True)]
    assert GEMMA.encode("ä<s>ä") == [IDS["ä"], 1, IDS["ä"]]
    assert LLAMA.encode("") == []


def test_text_never_becomes_a_control_or_a_byte_token():
    rows = [*ROWS, ("<", -900.0, NORMAL), ("s>", -901.0, NORMAL), ("<0x4", -902.0, NORMAL), ("1>", -903.0, NORMAL)]
    tokenizer = Tokenizer.from_gguf(metadata(rows, add_space_prefix=False))
    ids = tokenizer.encode_ordinary("<s><0x41>")
    assert not {IDS["<s>"], IDS["<0x41>"]} & set(ids)
    assert tokenizer.decode(ids) == "<s><0x41>"


def test_bytes_that_are_not_utf8_leave_the_characters_around_them():
    ids = [IDS[f"<0x{byte:02X}>"] for byte in (0x41, 0xF0, *"😀".encode(), 0xC3)]
    assert GEMMA.decode(ids) == "A\ufffd😀\ufffd"
    assert GEMMA.bytes_of(ids) == b"A\xf0\xf0\x9f\x98\x80\xc3"


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_grammar_is_followed(tokenizer):
    matcher = Compiler(tokenizer, [IDS["</s>"]]).compile(Grammar.regex("the (rain|plain)"))
    ids = slowly("the rain", prefix=False)
    for at, id in enumerate(ids):
        matcher.advance(ids[:at])
        assert matcher.allowed()[id // 8] >> id % 8 & 1
    matcher.advance(ids)
    assert matcher.forced() == IDS["</s>"]


WITHOUT_A_BYTE = [row for row in ROWS if row[0] != "<0x7F>"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (metadata(scores=None), "tokenizer.ggml.scores is missing"),
        (metadata(scores=[0.0]), rf"tokenizer.ggml.scores has 1 entries; tokenizer.ggml.tokens has {len(ROWS)}"),
        (metadata(scores=["a"] * len(ROWS)), "tokenizer.ggml.scores is missing or not a list of numbers"),
        (metadata(scores=[True] * len(ROWS)), "tokenizer.ggml.scores is missing or not a list of numbers"),
        (metadata(scores=[*[0.0] * (len(ROWS) - 1), math.nan]), "tokenizer.ggml.scores has .*NaN"),
        (metadata(WITHOUT_A_BYTE), "tokenizer.ggml.tokens has no byte token <0x7F>"),
        (metadata(tokens=None), "tokenizer.ggml.tokens is missing"),
        (metadata(token_type=3), "tokenizer.ggml.token_type is not a list"),
        (metadata(add_space_prefix=1), "tokenizer.ggml.add_space_prefix must be true or false, got 1"),
        (metadata([*ROWS, ("x" * 257, 0.0, NORMAL)]), "tokenizer.ggml.tokens has the token 'xxx.*longer than 256"),
    ],
)
def test_bad_metadata_is_named(bad, why):
    with pytest.raises(ModelError, match=why):
        Tokenizer.from_gguf(bad)


def test_pairs_are_limited(monkeypatch):
    monkeypatch.setattr("trioengine.text.gguf_tokenizer._MAX_MERGES", 20)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens has more than 20 pairs"):
        Tokenizer.from_gguf(metadata())
