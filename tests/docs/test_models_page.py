"""The page about models lists the types that are read, and the limits that hold."""

import re
from pathlib import Path

from trioengine.core.gguf import MAX_DECODED, MAX_TENSORS, TensorType
from trioengine.hub.checkpoint import GGUF_ARCHITECTURES, HF_ARCHITECTURES
from trioengine.hub.known_models import KNOWN_MODELS
from trioengine.hub.llama_config import MAX_PADDING
from trioengine.hub.model_config import MAX_JSON, MAX_MODEL_TENSORS, MAX_VALUES
from trioengine.hub.model_info import MAX_TOKENIZER
from trioengine.hub.safetensors import MAX_HEADER
from trioengine.text.gguf_tokenizer import SPLITTINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
README = (ROOT / "README.md").read_text()


def row(title):
    return re.search(rf"^\| {title} \|(.*)\|$", PAGE, re.MULTILINE).group(1)


def test_the_known_models():
    assert re.findall(r"^\| `([\w-]+)` \|.*MB", PAGE, re.MULTILINE) == list(KNOWN_MODELS)
    for known in KNOWN_MODELS.values():
        _, download, packages, terms = row(f"`{known.name}`").split("|")
        assert download == f" {known.download_size / 1e6:.0f} MB "
        assert packages.split()[0] == f"`{known.parts[0].package}`"
        assert known.license in terms
        assert f"* `{known.name}`" in README


def test_the_types_and_architectures():
    types, _ = row("tensor types").split("|")
    assert sorted(types.strip().split(", ")) == sorted(tensor_type.name for tensor_type in TensorType)
    gguf, safetensors = row("architecture").split("|")
    assert gguf.split(": ")[1].strip().split(", ") == list(GGUF_ARCHITECTURES)
    assert safetensors.split(": ")[1].strip().split(", ") == list(HF_ARCHITECTURES)


def test_the_tokenizers():
    gguf, _ = row("tokenizer").split("|")
    byte_level, sentencepiece = gguf.split("; ")
    assert re.findall(r"[\w-]+", byte_level.split("splitting ")[1].replace(" or ", ", ")) == list(SPLITTINGS)
    assert sentencepiece.startswith("`llama`")


def test_the_limits():
    assert row("memory for the metadata of a GGUF file") == f" {MAX_DECODED >> 20} MiB "
    assert row("tensors of a model, each expert's counted") == f" {MAX_MODEL_TENSORS:,} "
    assert row("tensors of a GGUF file, of which one holds all experts of a layer") == f" {MAX_TENSORS:,} "
    assert row("header of a safetensors file") == f" {MAX_HEADER >> 20} MiB, {MAX_VALUES:,} values "
    assert row("a JSON file or chat template") == f" {MAX_JSON >> 20} MiB, {MAX_VALUES:,} values "
    assert row("`tokenizer.json`") == f" {MAX_TOKENIZER >> 20} MiB "
    assert f"up to {MAX_PADDING} rows" in PAGE
