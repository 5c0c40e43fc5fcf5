"""Embedding models by their files: sentence-transformers' directories, and the metadata of GGUF files."""

import json
from pathlib import Path

import pytest
from helpers import tiny_embedder, tiny_smolvlm
from helpers.embedder_tokenizer import add_tokenizer
from helpers.tiny_embedder import KIND, MODULES, POOLING

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import read_safetensors
from trioengine.hub.model_info import read_model
from trioengine.hub.pooling import pools_gguf

OTHER = {**POOLING, "pooling_mode_lasttoken": False}
NEWER = {"embedding_dimension": 48, "include_prompt": True}
TYPES = [module["type"] for module in MODULES]


def modules(*types, paths=("", "1_Pooling", "2_Normalize")):
    return [{"idx": i, "path": path, "type": kind} for i, (kind, path) in enumerate(zip(types, paths, strict=False))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"modules": MODULES[:2]},
        {"modules": None},
        {"modules": modules(*(kind.replace(".models.", ".sentence_transformer.modules.x.") for kind in TYPES))},
        {"pooling": {**NEWER, "pooling_mode": "lasttoken"}},
        {"prefix": "model."},
        {"is_causal": True},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_an_embedding_model(tmp_path, changes):
    model = read_model(add_tokenizer(tiny_embedder.write(tmp_path, **changes)))
    assert model.embedding_size == 48
    assert model.tokenizer.surrounded(model.tokenizer.encode("ab")) == [97, 98, 256]
    header = read_safetensors(tmp_path)
    assert header.config.embeds and header.config.tie_word_embeddings
    assert "model.embed_tokens.weight" in header.tensors and "lm_head.weight" not in header.config.wanted_tensors()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": OTHER}, "the pooling '' is not supported; supported: lasttoken"),
        (
            {"pooling": {**OTHER, "pooling_mode_mean_tokens": True}},
            "1_Pooling/config.json: the pooling 'pooling_mode_mean_tokens' is not supported; supported: lasttoken",
        ),
        (
            {"pooling": {**POOLING, "pooling_mode_cls_token": True}},
            "the pooling 'pooling_mode_cls_token, pooling_mode_lasttoken' is not supported",
        ),
        ({"pooling": {**NEWER, "pooling_mode": "mean"}}, "the pooling 'mean' is not supported"),
        ({"pooling": {**NEWER, "pooling_mode": ["lasttoken", "mean"]}}, "is not supported; supported: lasttoken"),
        ({"pooling": {**POOLING, "pooling_mode_cls_token": 1}}, "pooling_mode_cls_token must be true or false, got 1"),
        (
            {"modules": modules(*TYPES[:2], f"{KIND}Dense")},
            "modules.json: the modules 'Transformer, Pooling, Dense' are not supported; "
            "supported: Transformer, Pooling, Normalize",
        ),
        ({"modules": []}, "the modules '' are not supported"),
        ({"modules": {}}, "modules.json: not a list of JSON objects"),
        ({"modules": [3]}, "modules.json: not a list of JSON objects"),
        ({"modules": [{"type": 3}]}, r"modules.json: \[0\].type must be a string, got 3"),
        ({"modules": modules(*TYPES, paths=("", "../x", ""))}, "its pooling in a folder of its own"),
        ({"modules": modules(*TYPES, paths=("", "", ""))}, "its pooling in a folder of its own"),
        ({"modules": modules(*TYPES, paths=("0_Model", "1_Pooling", ""))}, "the model must lie beside the file"),
        ({"modules": modules(*TYPES, paths=("", "2_Pooling", ""))}, "2_Pooling/config.json: No such file"),
        ({"is_causal": False}, "config.json: is_causal must be true, got False"),
    ],
)
def test_a_refused_model(tmp_path, changes, message):
    """In one line, which names the file."""
    with pytest.raises(ModelError, match=message) as caught:
        read_model(add_tokenizer(tiny_embedder.write(tmp_path, **changes)))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_model_with_images_is_refused(tmp_path):
    tiny_smolvlm.write(tmp_path, "split")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    with pytest.raises(ModelError, match="embedding models of the model_type idefics3 are not supported"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, False),
        ({"x.pooling_type": 0}, False),
        ({"x.pooling_type": 3}, True),
        ({"x.pooling_type": 3, "x.attention.causal": True}, True),
        ({"y.pooling_type": 3}, False),
    ],
)
def test_the_pooling_of_a_gguf_file(fields, found):
    assert pools_gguf(fields, Path("tiny.gguf"), "x") is found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x.pooling_type": 1}, r"tiny.gguf: x.pooling_type 1 \(mean\) is not supported; supported: 3 \(last\)"),
        ({"x.pooling_type": 2}, r"2 \(cls\) is not supported"),
        ({"x.pooling_type": 4}, r"4 \(rank\) is not supported"),
        ({"x.pooling_type": 9}, r"9 \(unknown\) is not supported"),
        ({"x.pooling_type": "last"}, "x.pooling_type must be an integer from 0"),
        ({"x.pooling_type": 3, "x.attention.causal": False}, "x.attention.causal must be true, got False"),
    ],
)
def test_a_refused_pooling_of_a_gguf_file(fields, message):
    with pytest.raises(ModelError, match=message):
        pools_gguf(fields, Path("tiny.gguf"), "x")
