"""Directories of Hugging Face files: the properties that are read, and the errors for unusable files."""

import json
import math
import os
import struct
from dataclasses import replace

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import HF_ARCHITECTURES
from trioengine.hub.model_info import ModelFormat, ModelInfo, read_model
from trioengine.text.tokenizer import Tokenizer

CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 64,
    "vocab_size": 8,
    "eos_token_id": 2,
    "hidden_size": 2,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "tie_word_embeddings": True,
}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def model_of(vocab):
    return {"type": "BPE", "vocab": vocab, "merges": []}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "</s>", **FLAGS}, {"id": 3, "content": "<s>", **FLAGS}],
    "model": model_of({"a": 0, "b": 1, "</s>": 2, "<s>": 3}),
}
# its suffixes are cut off as if they had the prefix, which they have not: a panic of the library
PANIC = {"type": "BPE", "continuing_subword_prefix": "####", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
UNKNOWN = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "none of them"}
TOKENIZER_CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "tokenizer.json", TOKENIZER)
    write(tmp_path, "tokenizer_config.json", TOKENIZER_CONFIG)
    write(tmp_path, "model.safetensors", weights(shapes()))
    return tmp_path


def shapes(vocab_size=8):
    """The tensors of CONFIG, by name."""
    layer = {
        "input_layernorm": [2],
        "self_attn.q_proj": [2, 2],
        "self_attn.k_proj": [2, 2],
        "self_attn.v_proj": [2, 2],
        "self_attn.o_proj": [2, 2],
        "post_attention_layernorm": [2],
        "mlp.gate_proj": [3, 2],
        "mlp.up_proj": [3, 2],
        "mlp.down_proj": [2, 3],
    }
    tensors = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    return {"model.embed_tokens.weight": [vocab_size, 2], "model.norm.weight": [2], **tensors}


def weights(shapes):
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write(directory, name, content):
    """A file, or none at all if its content is None."""
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def rendered(model):
    return model.chat_template.render([{"role": "user", "content": "x"}], add_generation_prompt=False)


def test_the_properties_of_a_directory(directory):
    model = read_model(directory)
    assert (model.bos_token, model.eos_token) == ("<s>", "</s>")
    assert replace(model, chat_template=None, bos_token="", eos_token="") == ModelInfo(
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
def test_the_file_that_the_end_tokens_are_read_from(directory, config, generation, expected):
    write(directory, "config.json", CONFIG | {"eos_token_id": config})
    if generation is not None:
        write(directory, "generation_config.json", generation)
    assert read_model(directory).eos_token_ids == expected


def test_a_model_that_never_ends_and_has_no_template(directory):
    write(directory, "config.json", CONFIG | {"eos_token_id": None})
    write(directory, "tokenizer_config.json", None)
    model = read_model(directory)
    assert (model.eos_token_ids, model.chat_template) == ((), None)


def test_the_file_that_the_chat_template_is_read_from(directory):
    templates = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default"}]
    write(directory, "tokenizer_config.json", TOKENIZER_CONFIG | {"chat_template": templates})
    assert rendered(read_model(directory)) == "<s>default"
    write(directory, "chat_template.jinja", b"{{ bos_token }}file")
    assert rendered(read_model(directory)) == "<s>file"


def test_weights_in_several_files(directory):
    names = list(shapes())
    for file, part in (("model.safetensors", names[:4]), ("other.safetensors", names[4:])):
        write(directory, file, weights({name: shapes()[name] for name in part}))
    weight_map = dict.fromkeys(names[:4], "model.safetensors") | dict.fromkeys(names[4:], "other.safetensors")
    write(directory, INDEX, {"weight_map": weight_map})
    assert read_model(directory).vocab_size == 8
    write(directory, INDEX, {"weight_map": weight_map | {"model.\x1b[31m": "other.safetensors"}})
    with pytest.raises(ModelError, match=r"json: tensor 'model\.\\x1b\[31m' is not in 'other\.safetensors'"):
        read_model(directory)


SUPPORTED = f"supported: {', '.join(HF_ARCHITECTURES)}"
COUNT = "must be an integer from 1 to 2147483647"
OLD = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, OLD: 64}


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
        ("config.json", [], "not a JSON object"),
        ("config.json", b" " * (8 << 20) + b" ", "the file is larger than 8388608 bytes"),
        ("config.json", b"[" + b"[]," * 300_000 + b"0]", "not JSON: more than 262144 values"),
        ("config.json", {"model_type": "mamba"}, f"model_type 'mamba' is not supported; {SUPPORTED}"),
        ("config.json", config(model_type=3), f"model_type 3 is not supported; {SUPPORTED}"),
        ("config.json", config(model_type="\x1b[31m" * 99), r"model_type '\x1b[31m\x1b[31m"),
        ("config.json", {"d_model": 768}, f"model_type None is not supported; {SUPPORTED}"),
        (
            "config.json",
            {"architectures": ["MambaForCausalLM"]},
            f"model_type None (architectures ['MambaForCausalLM']) is not supported; {SUPPORTED}",
        ),
        ("config.json", config(model_type="qwen2", num_key_value_heads=None), f"num_key_value_heads {COUNT}, got None"),
        ("config.json", {"model_type": "llama"}, f"hidden_size {COUNT}, got None"),
        ("config.json", config(vocab_size="8"), f"vocab_size {COUNT}, got '8'"),
        ("config.json", config(max_position_embeddings=True), f"max_position_embeddings {COUNT}, got True"),
        ("config.json", config(max_position_embeddings=None), f"max_position_embeddings {COUNT}, got None"),
        ("config.json", config(hidden_size=[2]), f"hidden_size {COUNT}, got [2]"),
        ("config.json", config(hidden_size=2.0), f"hidden_size {COUNT}, got 2.0"),
        ("config.json", config(intermediate_size=10**4000), f"intermediate_size {COUNT}, got 1000"),
        ("config.json", config(num_attention_heads={}), f"num_attention_heads {COUNT}, got {{}}"),
        ("config.json", config(num_key_value_heads=2), "num_key_value_heads must divide the number of heads, 1, got 2"),
        ("config.json", config(num_hidden_layers="3"), f"num_hidden_layers {COUNT}, got '3'"),
        ("config.json", config(num_hidden_layers=1 << 31), f"num_hidden_layers {COUNT}, got 2147483648"),
        ("config.json", config(num_hidden_layers=10**9), "num_hidden_layers must be at most the number of tensors, 11"),
        ("config.json", config(head_dim=7), "head_dim must be even"),
        ("config.json", config(num_attention_heads=2), "head_dim must be even, got 1"),
        ("config.json", config(num_attention_heads=3), f"head_dim {COUNT}, got 0"),
        ("config.json", config(rms_norm_eps=0), "rms_norm_eps must be a number above 0 and at most 3.4e+38, got 0"),
        ("config.json", config(rms_norm_eps="1e-5"), "rms_norm_eps must be a number above 0"),
        ("config.json", config(rope_theta=10**400), "rope_theta must be a number above 0"),
        ("config.json", config(rope_theta=math.nan), "rope_theta must be a number above 0"),
        ("config.json", config(tie_word_embeddings="false"), "tie_word_embeddings must be true or false, got 'false'"),
        ("config.json", config(attention_bias=0), "attention_bias must be true or false, got 0"),
        ("config.json", config(hidden_act=["silu"]), "hidden_act ['silu'] is not supported; supported: silu"),
        ("config.json", config(rope_scaling=[1]), "rope_scaling must be an object, got [1]"),
        ("config.json", config(rope_scaling={"rope_type": ["x"]}), "rope scaling ['x'] is not supported"),
        ("config.json", config(rope_scaling={"factor": 2.0}), "rope scaling None is not supported"),
        ("config.json", config(rope_scaling={"type": "linear"}), "rope_scaling.factor must be a number above 0"),
        ("config.json", config(rope_parameters=LLAMA3 | {"factor": "8"}), "rope_parameters.factor must be a number"),
        ("config.json", config(rope_scaling=LLAMA3 | {OLD: [8]}), f"rope_scaling.{OLD} {COUNT}, got [8]"),
        (
            "config.json",
            config(rope_scaling=LLAMA3 | {"high_freq_factor": 1.0}),
            "rope_scaling.high_freq_factor must be above low_freq_factor, 1.0, got 1.0",
        ),
        ("config.json", config(eos_token_id=8), "eos_token_id must be token ids below 8, got 8"),
        ("config.json", config(eos_token_id=["2"]), "eos_token_id must be token ids below 8, got ['2']"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id must be token ids below 8, got -1"),
        ("generation_config.json", b"", "not JSON: "),
        ("tokenizer.json", None, "No such file or directory"),
        ("tokenizer.json", b"{}", "tokenizer.json cannot be used: "),
        ("tokenizer.json", bytes((32 << 20) + 1), "the file is larger than 33554432 bytes"),
        ("tokenizer.json", {"model": PANIC, "added_tokens": []}, "tokenizer.json cannot be used: "),
        ("tokenizer.json", {"model": UNKNOWN, "added_tokens": []}, "tokenizer.json cannot be used: "),
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
        ("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}", "not a safetensors file: a header of"),
        (INDEX, {"weight_map": {}}, "weight_map must be an object of file names"),
        (INDEX, {"weight_map": ["a"]}, "weight_map must be an object of file names"),
        (INDEX, {"weight_map": {"a": 3}}, "weight_map must be an object of file names"),
        (INDEX, {"weight_map": {"a": "none.safetensors"}}, "weight_map names 'none.safetensors', which is not there"),
        (INDEX, {"weight_map": {"a": "x" * 9999}}, "weight_map names 'xxx"),
        ("model.safetensors", struct.pack("<Q", 9999) + b'{"' + b"x" * 9993 + b'":3}', "tensor 'xxx"),
        (INDEX, {"weight_map": {"a": "\0.safetensors"}}, r"weight_map names '\x00.safetensors', which is not there"),
    ],
)
def test_a_bad_file_of_a_directory_is_named(directory, name, content, message):
    write(directory, name, content)
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value).startswith(f"{directory / name}: {message}")
    assert len(str(caught.value)) < 400 + len(str(directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "missing tensors: 'model.norm.weight'"),
        ({"model.more\x1b": [1]}, r"unexpected tensors: 'model.more\x1b'"),
        ({"model.norm.weight": [3]}, "tensor model.norm.weight has the shape [3], not [2]"),
        ({f"a{number}": [1] for number in range(7)}, "unexpected tensors: 'a0', 'a1', 'a2', 'a3', 'a4' and 2 more"),
    ],
)
def test_tensors_that_are_missing_unexpected_or_of_another_shape(directory, changes, message):
    tensors = {name: shape for name, shape in (shapes() | changes).items() if shape is not None}
    write(directory, "model.safetensors", weights(tensors))
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value) == f"{directory}: {message}"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(directory, name):
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value) == f"{directory / name}: not a regular file"


def test_a_token_of_a_huge_id(directory):
    """The tables of tokens hold those that there are: 2**31 would be 16 GB."""
    vocab = {"a": 0, "b": 1, "</s>": 2, "<s>": 3, "far": (1 << 31) - 2}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = Tokenizer.from_json(json.dumps({**TOKENIZER, "decoder": decoder, "model": model_of(vocab)}))
    assert (tokenizer.vocab_size, tokenizer.bytes_of([0, 5, (1 << 31) - 2])) == ((1 << 31) - 1, b"afar")


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
    write(directory, "model.safetensors", weights(shapes(100)))
    model = read_model(directory)
    assert (model.vocab_size, model.tokenizer.vocab_size) == (100, 9)


def test_the_tokenizers_end_token_is_one_of_the_models(directory):
    write_larger_tokenizer(directory, "</s>")
    assert read_model(directory).eos_token_ids == (2,)
    write(directory, "config.json", config(eos_token_id=None, vocab_size=9))
    write(directory, "model.safetensors", weights(shapes(9)))
    assert read_model(directory).eos_token_ids == (8,)
    write(directory, "config.json", config(eos_token_id=None))
    write(directory, "model.safetensors", weights(shapes()))
    with pytest.raises(ModelError) as caught:
        read_model(directory)
    assert str(caught.value) == (
        f"{directory / 'tokenizer_config.json'}: eos_token must be a token below 8, got '</s>'"
    )


def test_a_directory_without_a_config_or_weights(directory):
    write(directory, "model.safetensors", None)
    with pytest.raises(
        ModelError, match=r"the directory has no model\.safetensors, and no model\.safetensors\.index\.json"
    ):
        read_model(directory)
    write(directory, "config.json", None)
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        read_model(directory)
