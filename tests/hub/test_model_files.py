"""Models of both formats, the real one first; each file and field that can be wrong is named."""

import json
import re
import struct
from dataclasses import replace

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.known_models import SMOLLM2
from trioengine.hub.model_files import ModelFormat, read_model
from trioengine.hub.model_info import ModelInfo

# ---- GGUF ----------------------------------------------------------------------------------------------------------


def test_smollm2(smollm2):
    model = read_model(smollm2)
    assert (model.path, model.format, model.model_type) == (smollm2, ModelFormat.GGUF, "llama")
    assert (model.context_length, model.vocab_size, model.eos_token_ids) == (8192, 49152, (2,))
    assert model.tokenizer.encode("<|im_start|>user\nHello<|im_end|>") == [1, 4093, 198, 19556, 2]
    rendered = model.chat_template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_pulled_file_that_is_damaged_has_a_remedy(smollm2, tmp_path, monkeypatch):
    whole = smollm2.read_bytes()
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))
    pulled, other = tmp_path / SMOLLM2.location, tmp_path / "other.gguf"
    pulled.parent.mkdir()
    for size in (0, 100, len(whole) - 1):
        for path in (pulled, other):
            path.write_bytes(whole[:size])
        remedy = "; remove it and run `trioengine pull smollm2-135m-instruct`"
        with pytest.raises(ModelError, match=f"{re.escape(str(pulled))}: .*{remedy}$"):
            read_model(pulled)
        with pytest.raises(ModelError) as caught:
            read_model(other)
        assert remedy not in str(caught.value)


TOKENS = ["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 3, 1],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}",
}


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def typed(content):
    """(number of the type, bytes) of a value."""
    if isinstance(content, str):
        return 8, string(content)
    if isinstance(content, list):
        kind = typed(content[0])[0] if content else 4
        return 9, struct.pack("<IQ", kind, len(content)) + b"".join(typed(one)[1] for one in content)
    return (4, struct.pack("<I", content)) if isinstance(content, int) else (6, struct.pack("<f", content))


def write_gguf(path, changes, rows=None):
    """METADATA with changes (None leaves a key out), and an embedding of `rows` rows."""
    metadata = {key: content for key, content in (METADATA | changes).items() if content is not None}
    entries = b""
    for key, content in metadata.items():
        kind, data = typed(content)
        entries += string(key) + struct.pack("<I", kind) + data
    tensors = b"" if rows is None else string("token_embd.weight") + struct.pack("<IQQIQ", 2, 1, rows, 0, 0)
    head = struct.pack("<4sIQQ", b"GGUF", 3, int(rows is not None), len(metadata)) + entries + tensors
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(4 * (rows or 0)))
    return path


def gguf_model(tmp_path, changes=None, rows=None):
    return read_model(write_gguf(tmp_path / "some.gguf", changes or {}, rows))


def test_a_gguf_file(tmp_path):
    model = gguf_model(tmp_path)
    tokenizer, template = model.tokenizer, model.chat_template
    assert model == ModelInfo(tmp_path / "some.gguf", ModelFormat.GGUF, "llama", 64, 7, (5, 3), template, tokenizer)
    assert tokenizer.encode("ab<|im_end|>b") == [2, 5, 1]
    assert template.render([{"content": "x"}], add_generation_prompt=False) == "<|im_start|>x<|im_end|>"


def test_a_model_without_a_chat_template(tmp_path):
    assert gguf_model(tmp_path, {"tokenizer.chat_template": None}).chat_template is None


def test_a_vocabulary_padded_in_the_embedding(tmp_path):
    assert gguf_model(tmp_path, rows=8).vocab_size == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (5, 3)),
        ({"tokenizer.ggml.unknown_token_id": 3}, (5,)),  # as in SmolLM2
        ({"tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 2}, (5, 6, 2, 3)),
        ({"tokenizer.ggml.eos_token_id": 3}, (3, 5)),
        ({"tokenizer.ggml.eos_token_id": None}, (5, 3)),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.token_type": [1] * 7}, (2,)),  # <|im_end|> is ordinary text
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.token_type": None}, ()),
    ],
)
def test_the_end_tokens(tmp_path, changes, expected):
    assert gguf_model(tmp_path, changes).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.count": 3}, "split.count: a model split into several files is not supported"),
        ({"general.architecture": None}, "general.architecture is missing or no string"),
        ({"general.architecture": 3}, "general.architecture is missing or no string"),
        ({"llama.context_length": None}, "llama.context_length must be a positive integer, got None"),
        ({"llama.context_length": 0}, "llama.context_length must be a positive integer, got 0"),
        ({"llama.context_length": 0.5}, "llama.context_length must be a positive integer, got 0.5"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', which is not supported"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre is 'other', which is not supported"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre is ['gpt-2'], which is not supported"),
        ({"tokenizer.ggml.pre": "x" * 9999}, "tokenizer.ggml.pre is 'xxx"),
        ({"tokenizer.ggml.model": "x" * 9999}, "tokenizer.ggml.model is 'xxx"),
        ({"general.architecture": "x" * 9999}, "xxx"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges has "),
        ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type is no list"),
        ({"tokenizer.ggml.eos_token_id": 7}, "tokenizer.ggml.eos_token_id must be a token id below 7, got 7"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "tokenizer.ggml.eos_token_id must be a token id below 7"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is no string"),
        ({"tokenizer.chat_template": "{% if"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{{ " + "(" * 3000 + ")" * 3000 + " }}"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{{ " + "-" * 5000 + "1 }}"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{% include " + "x" * 9999}, "the chat template does not compile"),
    ],
)
def test_a_bad_gguf_key_is_named(tmp_path, changes, message):
    with pytest.raises(ModelError) as caught:
        gguf_model(tmp_path, changes)
    assert str(caught.value).startswith(f"{tmp_path / 'some.gguf'}: {message}")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_an_embedding_smaller_than_the_vocabulary(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens has 7 tokens, token_embd\.weight 6"):
        gguf_model(tmp_path, rows=6)


def test_files_that_are_no_gguf(tmp_path):
    path = tmp_path / "some.gguf"
    with pytest.raises(ModelError, match=r"some\.gguf: No such file"):
        read_model(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"some\.gguf: the file is empty"):
        read_model(path)
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match=r"some\.gguf: not a GGUF file"):
        read_model(path)


# ---- a directory ---------------------------------------------------------------------------------------------------

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
