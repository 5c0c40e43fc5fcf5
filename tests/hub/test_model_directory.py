"""What is read of a directory of Hugging Face files, and what is said of one that cannot be used."""

import json
import struct
from dataclasses import replace

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.model_files import ModelFormat, read_model
from trioengine.hub.model_info import ModelInfo

CONFIG = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 8, "eos_token_id": 2}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def model_of(vocab):
    return {"type": "BPE", "vocab": vocab, "merges": []}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "</s>", **FLAGS}, {"id": 3, "content": "<s>", **FLAGS}],
    "model": model_of({"a": 0, "b": 1, "</s>": 2, "<s>": 3}),
}
TOKENIZER_CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
}
WEIGHTS = struct.pack("<Q", 2) + b"{}"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "tokenizer.json", TOKENIZER)
    write(tmp_path, "tokenizer_config.json", TOKENIZER_CONFIG)
    write(tmp_path, "model.safetensors", WEIGHTS)
    return tmp_path


def write(directory, name, content):
    """A file, or none at all if its content is None."""
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def rendered(model):
    return model.chat_template.render([{"role": "user", "content": "x"}], add_generation_prompt=False)


def test_a_directory(directory):
    model = read_model(directory)
    assert replace(model, chat_template=None) == ModelInfo(
        directory, ModelFormat.SAFETENSORS, "llama", 64, 8, (2,), None, model.tokenizer
    )
    assert model.tokenizer.encode("ab</s>") == [0, 1, 2]
    assert rendered(model) == "<s>x</s>"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 0, 2], None, (2, 0)),
        (2, {}, (2,)),
        (2, {"eos_token_id": [1, 2]}, (1, 2)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (None, None, (2,)),  # the tokenizer's eos_token
    ],
)
def test_where_the_end_tokens_come_from(directory, config, generation, expected):
    write(directory, "config.json", CONFIG | {"eos_token_id": config})
    if generation is not None:
        write(directory, "generation_config.json", generation)
    assert read_model(directory).eos_token_ids == expected


def test_a_model_that_never_ends_and_has_no_template(directory):
    write(directory, "config.json", CONFIG | {"eos_token_id": None})
    write(directory, "tokenizer_config.json", None)
    model = read_model(directory)
    assert (model.eos_token_ids, model.chat_template) == ((), None)


def test_where_the_chat_template_comes_from(directory):
    templates = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default"}]
    write(directory, "tokenizer_config.json", TOKENIZER_CONFIG | {"chat_template": templates})
    assert rendered(read_model(directory)) == "<s>default"
    write(directory, "chat_template.jinja", b"{{ bos_token }}file")
    assert rendered(read_model(directory)) == "<s>file"


def test_weights_in_several_files(directory):
    write(directory, "other.safetensors", WEIGHTS)
    write(directory, INDEX, {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}})
    assert read_model(directory).vocab_size == 8


def config(**fields):
    return CONFIG | fields


def tokenizer_config(**fields):
    return TOKENIZER_CONFIG | fields


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "not JSON: "),
        ("config.json", b"\xff", "not UTF-8"),
        ("config.json", b"[" * 100_000, "not JSON: "),
        ("config.json", [], "no JSON object"),
        ("config.json", config(model_type=None), "model_type must be a string, got None"),
        ("config.json", config(model_type=3), "model_type must be a string, got 3"),
        ("config.json", config(vocab_size="8"), "vocab_size must be a positive integer, got '8'"),
        ("config.json", config(max_position_embeddings=True), "max_position_embeddings must be a positive integer"),
        ("config.json", config(max_position_embeddings=None), "max_position_embeddings must be a positive integer"),
        ("config.json", config(eos_token_id=8), "eos_token_id must be token ids below 8, got 8"),
        ("config.json", config(eos_token_id=["2"]), "eos_token_id must be token ids below 8, got ['2']"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id must be token ids below 8, got -1"),
        ("generation_config.json", b"", "not JSON: "),
        ("tokenizer.json", None, "No such file or directory"),
        ("tokenizer.json", b"{}", "tokenizer.json cannot be used: "),
        ("tokenizer_config.json", b"nonsense", "not JSON: "),
        ("tokenizer_config.json", tokenizer_config(bos_token=3), "bos_token must be a string, got 3"),
        ("tokenizer_config.json", tokenizer_config(eos_token={"content": 3}), "eos_token must be a string, got {"),
        ("tokenizer_config.json", tokenizer_config(chat_template=3), "chat_template must be a string or a list"),
        ("tokenizer_config.json", tokenizer_config(chat_template=["x"]), "chat_template must be a string or a list"),
        ("tokenizer_config.json", tokenizer_config(chat_template=[]), "chat_template has no template named default"),
        ("tokenizer_config.json", tokenizer_config(chat_template="{% if"), "the chat template does not compile"),
        ("chat_template.jinja", b"{% if", "the chat template does not compile"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("model.safetensors", b"", "not a safetensors file"),
        (INDEX, {"weight_map": ["a"]}, "weight_map must be an object of file names"),
        (INDEX, {"weight_map": {"a": 3}}, "weight_map must be an object of file names"),
        (INDEX, {"weight_map": {"a": "none.safetensors"}}, "weight_map names none.safetensors, which is not there"),
        (INDEX, {"weight_map": {"a": "x" * 9999}}, "weight_map names xxx"),
        ("model.safetensors", struct.pack("<Q", 9999) + b'{"' + b"x" * 9993 + b'":3}', "tensor xxx"),
    ],
)
def test_a_bad_file_of_a_directory_is_named(directory, name, content, message):
    write(directory, name, content)
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value).startswith(f"{directory / name}: {message}")
    assert len(str(caught.value)) < 300 + len(str(directory))


def write_larger_tokenizer(directory, name):
    """Its last token lies beyond the usual vocab_size of 8; ids need not be without holes."""
    special = {"id": 8, "content": name, **FLAGS}
    vocab = {"a": 0, "b": 1, "</s>": 2, name: 8}
    write(directory, "tokenizer.json", {**TOKENIZER, "added_tokens": [special], "model": model_of(vocab)})


def test_a_tokenizer_larger_than_the_model(directory):
    """A pad token that was added, as many have it: a prompt cannot hold it."""
    write_larger_tokenizer(directory, "<pad>")
    model = read_model(directory)
    assert (model.vocab_size, model.tokenizer.vocab_size, model.tokenizer.special_tokens) == (8, 8, {"<pad>": 8})
    write(directory, "config.json", config(vocab_size=100))
    model = read_model(directory)
    assert (model.vocab_size, model.tokenizer.vocab_size) == (100, 9)


def test_the_tokenizers_end_token_is_one_of_the_models(directory):
    write_larger_tokenizer(directory, "</s>")
    assert read_model(directory).eos_token_ids == (2,)
    write(directory, "config.json", config(eos_token_id=None, vocab_size=9))
    assert read_model(directory).eos_token_ids == (8,)
    write(directory, "config.json", config(eos_token_id=None))
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value) == (
        f"{directory / 'tokenizer_config.json'}: eos_token must be a token below 8, got '</s>'"
    )


def test_a_directory_without_a_config_or_weights(directory):
    write(directory, "model.safetensors", None)
    with pytest.raises(ModelError, match=r"the directory has no \*\.safetensors"):
        read_model(directory)
    write(directory, "config.json", None)
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        read_model(directory)
