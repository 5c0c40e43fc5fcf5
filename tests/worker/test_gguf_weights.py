"""GGUF files: the types of their tensors, their metadata, and files that lie."""

import gguf
import numpy as np
import pytest
import torch
from helpers.tiny_gguf import iq4_nl, write_gguf
from helpers.torch_driver import generate, load, reference

from trioengine.core.errors import ModelError
from trioengine.core.gguf import TensorType
from trioengine.hub.checkpoint import GGUF_ARCHITECTURES
from trioengine.hub.rope_config import RopeScaling, RopeType
from trioengine.worker.kernels.rotary import inverse_frequencies
from trioengine.worker.weights import open_checkpoint

TYPES = [tensor_type.name for tensor_type in TensorType]
EXPECTED = reference("tiny_reference.json")


@pytest.mark.parametrize("variant", ["plain", "tied", "linear", "llama3", "bias", "qwen2", "qwen2-tied"])
def test_gguf_says_what_transformers_says(tiny_llama, tmp_path, variant):
    """llama3 scaling travels as frequency divisors; the other kinds as metadata."""
    extra = {}
    if variant == "llama3":
        scaling = open_checkpoint(str(tiny_llama.write(tmp_path, variant))).config.rope_scaling
        assert scaling == RopeScaling(RopeType.LLAMA3, 8.0, 64, 1.0, 4.0)
        plain = inverse_frequencies(10000.0, 8, RopeScaling(), 256)
        extra["rope_freqs.weight"] = (plain / inverse_frequencies(10000.0, 8, scaling, 256)).numpy()
    runner = load(write_gguf(tiny_llama, tmp_path / "tiny.gguf", variant, extra=extra))
    assert generate(runner, [tiny_llama.PROMPT], 48)[0] == [EXPECTED[variant]["output"]]


@pytest.mark.parametrize(
    ("metadata", "variant"),
    [
        ({"llama.rope.scaling.factor": 4.0}, "linear"),
        ({"llama.rope.scale_linear": 4.0}, "linear"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 4.0}, "linear"),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, "linear"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "plain"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scale_linear": 4.0}, "plain"),
        ({"llama.rope.scaling.type": "linear"}, "plain"),
        ({"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 4.0}, "plain"),
        ({"llama.rope.scaling.factor": 1.0}, "plain"),
    ],
)
def test_rope_scaling_is_as_llama_cpp_reads_it(tiny_llama, tmp_path, metadata, variant):
    """Linear where no type is named; 0 scales nothing. The reference is transformers' answer to the scaling."""
    runner = load(write_gguf(tiny_llama, tmp_path / "tiny.gguf", "linear", metadata=metadata))
    assert generate(runner, [tiny_llama.PROMPT], 48)[0] == [EXPECTED[variant]["output"]]


def test_a_model_of_iq4_nl_weights(tiny_llama, tmp_path):
    """The same answer, and the same bits, as from the numbers that the gguf package makes of the blocks."""
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {**tiny_llama.BASE, **changes}
    kinds = {name: "IQ4_NL" for name, tensor in tiny_llama.tensors(config).items() if tensor.ndim == 2}

    def rounded(name, array):
        kind = gguf.GGMLQuantizationType.IQ4_NL
        return gguf.quants.dequantize(iq4_nl(array), kind) if name in kinds else array

    stored = write_gguf(tiny_llama, tmp_path / "stored.gguf", "plain", kinds=kinds, **changes)
    plain = write_gguf(tiny_llama, tmp_path / "plain.gguf", "plain", values=rounded, **changes)
    ours, theirs = open_checkpoint(str(stored)), open_checkpoint(str(plain))
    for name in ours.tensors:
        assert torch.equal(ours.read(name, torch.float32), theirs.read(name, torch.float32))
    ours.close()
    theirs.close()
    answers = [generate(load(path), [tiny_llama.PROMPT], 24)[0] for path in (stored, plain)]
    assert answers[0] == answers[1]
    original = tiny_llama.tensors(config)["model.layers.0.mlp.up_proj.weight"].numpy()
    np.testing.assert_allclose(rounded("model.layers.0.mlp.up_proj.weight", original), original, atol=0.08)


@pytest.mark.parametrize("kind", TYPES)
def test_every_gguf_type_is_dequantized(tiny_llama, tmp_path, kind):
    """Bit for bit what the gguf package says; types that it cannot write are filled with random bytes."""
    kind_type = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[kind_type]
    rng = np.random.default_rng(0)
    changes = {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 40, "tie_word_embeddings": True}
    path = tmp_path / "tiny.gguf"
    try:
        write_gguf(tiny_llama, path, "plain", kinds={"model.embed_tokens.weight": kind}, **changes)
    except NotImplementedError:  # the gguf package reads this type, and does not write it
        write_gguf(tiny_llama, path, "plain", **changes)
        blocks = rng.integers(0, 256, (40, 256 // elements * size), dtype=np.uint8) & 0xBF  # no scale is infinite
        path.write_bytes(_replace_embedding(path, blocks, kind_type))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["token_embd.weight"]
    assert stored.tensor_type.name == kind
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    checkpoint = open_checkpoint(str(path))
    values = checkpoint.read("model.embed_tokens.weight", torch.float32)
    assert values.shape == (40, 256)
    np.testing.assert_array_equal(values.numpy(), expected)
    rounded = checkpoint.read("model.embed_tokens.weight", torch.bfloat16)
    assert torch.equal(rounded.nan_to_num(), values.bfloat16().nan_to_num())
    checkpoint.close()


def test_integers_have_the_rotary_layout(tiny_llama, tmp_path):
    """Their rows are in Hugging Face's order, as those of the tensors are."""
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    changes = {"hidden_size": 64, "num_hidden_layers": 1}
    for kind in ("Q4_1", "Q8_0"):
        path = write_gguf(tiny_llama, tmp_path / f"{kind}.gguf", "plain", kinds=dict.fromkeys(names, kind), **changes)
        checkpoint = open_checkpoint(str(path))
        for name in names:
            integers = checkpoint.read_integers(name)
            assert torch.equal(integers.dequantize(), checkpoint.read(name, torch.float32))
        assert checkpoint.read_integers("model.layers.0.self_attn.o_proj.weight") is None
        checkpoint.close()


def _replace_embedding(path, blocks, kind):
    """The same file with other data for the embedding: rewritten from its reader."""
    reader = gguf.GGUFReader(path)
    other = path.with_suffix(".new")
    writer = gguf.GGUFWriter(other, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        embedding = tensor.name == "token_embd.weight"
        writer.add_tensor(tensor.name, blocks if embedding else tensor.data, raw_dtype=kind if embedding else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other.read_bytes()


def test_gguf_that_is_cut(tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "plain")
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            load(path)


def test_gguf_of_another_architecture(tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "plain", architecture="mamba")
    with pytest.raises(ModelError, match=f"'mamba' is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"):
        load(path)


def test_gguf_with_a_tensor_too_many(tiny_llama, tmp_path):
    extra = {"blk.0.attn_sinks.weight": np.zeros(6, dtype=np.float32)}
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "plain", extra=extra)
    with pytest.raises(ModelError, match=r"unexpected tensors: 'blk\.0\.attn_sinks\.weight'"):
        load(path)


def test_gguf_in_capitals(tiny_llama, tmp_path):
    assert open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "TINY.GGUF", "plain"))) is not None
