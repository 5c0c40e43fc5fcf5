"""Model files: GGUF types, sharded safetensors, and files that lie."""

import json
import math
import os
import struct

import gguf
import numpy as np
import pytest
import torch
from helpers.torch_driver import generate, load, needs_cuda, reference
from safetensors.torch import load_file, save_file

from trioengine.core.errors import ModelError
from trioengine.core.gguf import TensorType
from trioengine.hub.checkpoint import GGUF_ARCHITECTURES, HF_ARCHITECTURES
from trioengine.hub.llama_config import config_from_hf
from trioengine.hub.model_config import Fields
from trioengine.hub.rope_config import RopeScaling, RopeType
from trioengine.worker.kernels.linear import make_linear
from trioengine.worker.kernels.rotary import inverse_frequencies
from trioengine.worker.weights import open_checkpoint

TYPES = [tensor_type.name for tensor_type in TensorType]
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])  # ggml-common.h
EXPECTED = reference("tiny_reference.json")


def permuted(weight, heads):
    """llama.cpp's layout of query and key rows: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(theirs, ours)
    return name


def iq4_nl(array):
    """Blocks of 32 numbers, each the nearest value of ggml's table times the block's scale; gguf only reads them."""
    groups = array.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    scaled = groups / scales.astype(np.float32)
    codes = np.abs(scaled[..., None] - IQ4_NL_VALUES).argmin(axis=-1).astype(np.uint8)
    blocks = np.concatenate((scales.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4), axis=1)
    return blocks.reshape(*array.shape[:-1], array.shape[-1] // 32 * 18)


def stored_as(array, kind):
    return iq4_nl(array) if kind.name == "IQ4_NL" else gguf.quants.quantize(array, kind)


def new_writer(path, architecture, config):
    """A GGUF file with the metadata that every architecture has."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    return writer


def write_gguf(
    tiny_llama, path, variant, architecture=None, kinds=None, extra=None, metadata=None, values=None, **changes
):
    """The variant as a GGUF file; `kinds` gives the stored type of some tensors, `values` maps all numbers."""
    config = {**tiny_llama.BASE, **tiny_llama.VARIANTS[variant], **changes}
    writer = new_writer(path, architecture or config["model_type"], config)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    if variant == "linear" and metadata is None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {name: tensor.numpy() for name, tensor in tiny_llama.tensors(config).items()}
    for name, array in {**tensors, **(extra or {})}.items():
        for projection, count in heads.items():
            array = permuted(array, count) if projection in name and config["model_type"] == "llama" else array
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        array = np.ascontiguousarray(array)
        stored = stored_as(array if values is None else values(name, array), kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_linear_scaling_under_its_old_name(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "plain", rope_scaling={"type": "linear", "factor": 4.0})
    assert generate(load(path), [tiny_llama.PROMPT], 48)[0] == [EXPECTED["linear"]["output"]]


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
    except NotImplementedError:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_linear_layers_of_torch(dtype, with_bias, rows):
    """Packed where the library can: the product, also of rows that do not lie one after the other."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    x = torch.randn(rows, 128, generator=generator).to(dtype)[:, :64]
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    found = make_linear(weight.clone(), bias if with_bias else None)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=20 * tolerance)
    wide = make_linear(weight.clone(), bias if with_bias else None, torch.float32)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, found.float())


@pytest.mark.parametrize("with_bias", [False, True])
def test_sums_of_cuda_are_not_rounded(with_bias):
    needs_cuda()
    weight, bias = torch.randn(96, 64).bfloat16().cuda(), torch.randn(96).bfloat16().cuda()
    x = torch.randn(5, 64).bfloat16().cuda()
    found = make_linear(weight, bias if with_bias else None, torch.float32)(x)
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)


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


def test_shards(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "plain")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name].half() for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert generate(load(path), [tiny_llama.PROMPT], 4)[0][0] == EXPECTED["plain"]["output"][:4]
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.more.weight": file}}))
    with pytest.raises(ModelError, match=r"json: tensor 'model\.more\.weight' is not in 'model-00002"):
        load(path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": "../up.safetensors"}}))
    with pytest.raises(ModelError, match=r"weight_map names '\.\./up\.safetensors', which is not there"):
        load(path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "gone.safetensors")}))
    with pytest.raises(ModelError, match=r"weight_map names 'gone\.safetensors', which is not there"):
        load(path)


def _header(size, **changes):
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    text = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(16)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        _header(1 << 40),
        _header(None, shape=[5]),
        _header(None, data_offsets=[0, 1 << 40]),
        _header(None, data_offsets=[16, 0]),
        _header(None, dtype="F99"),
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_a_lying_safetensors_header(tiny_llama, tmp_path, data):
    path = tiny_llama.write(tmp_path, "plain")
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load(path)


def test_a_file_that_has_changed_since_its_header_was_read(tiny_llama, tmp_path):
    checkpoint = open_checkpoint(str(tiny_llama.write(tmp_path, "plain")))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: "):
        checkpoint.read("model.norm.weight", torch.float32)


def test_weights_larger_than_the_memory(tiny_llama, tmp_path):
    """A file with holes takes no room on the disk, however large it is."""
    path = tiny_llama.write(tmp_path, "plain")
    changes = {"vocab_size": 1 << 30, "hidden_size": 1 << 10, "num_hidden_layers": 1, "tie_word_embeddings": True}
    config = {**tiny_llama.BASE, **changes, "head_dim": 8, "num_attention_heads": 6, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in config_from_hf(Fields(path, config), 100).wanted_tensors().items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path / "model.safetensors", 8 + len(text) + end)
    with pytest.raises(ModelError, match=r"the weights take \d+ bytes of memory, and the machine has \d+"):
        load(path)


def test_tensors_that_are_missing_unexpected_or_of_another_shape(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "plain")
    tensors = load_file(path / "model.safetensors")

    def refusal(changed):
        save_file(changed, path / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            load(path)
        return str(caught.value)

    assert "missing tensors: 'model.norm.weight'" in refusal(
        {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    )
    assert "unexpected tensors: 'model.more'" in refusal({**tensors, "model.more": torch.zeros(1)})
    shape = refusal({**tensors, "model.norm.weight": torch.zeros(47)})
    assert "model.norm.weight has the shape [47], not [48]" in shape
    dtype = refusal({**tensors, "model.norm.weight": torch.zeros(48, dtype=torch.int64)})
    assert "'model.norm.weight' has the dtype I64; supported: F32, F16, BF16" in dtype
    several = refusal({k: v for k, v in tensors.items() if "layers.1" not in k})
    assert several.endswith("and 4 more")


def test_buffers_and_tied_heads_are_passed_over(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "tied")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    assert generate(load(path), [tiny_llama.PROMPT], 4)[0][0] == EXPECTED["tied"]["output"][:4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, f"'mamba' is not supported; supported: {', '.join(HF_ARCHITECTURES)}"),
        ({"model_type": None}, "model_type None (architectures ['LlamaForCausalLM']) is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "rope scaling 'mrope' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor must be a number above 0"),
        ({"rope_scaling": [1]}, "config.json: rope_scaling must be an object, got [1]"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must divide the number of heads, 6, got 4"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer from 1 to 2147483647, got '3'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
    ],
)
def test_configurations_that_are_refused(tiny_llama, tmp_path, changes, message):
    path = tiny_llama.write(tmp_path, "plain")
    (path / "config.json").write_text(json.dumps({**tiny_llama.BASE, **changes}))
    with pytest.raises(ModelError) as caught:
        load(path)
    assert message in str(caught.value)


def test_paths_that_hold_no_model(tiny_llama, tmp_path):
    for path, message in (
        (tmp_path / "gone", "no model at"),
        (tmp_path, r"config\.json: No such file"),
        (__file__, "neither a .gguf file nor a directory"),
    ):
        with pytest.raises(ModelError, match=message):
            load(path)
    path = tiny_llama.write(tmp_path / "model", "plain")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        load(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
        load(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"config\.json: hidden_size must be an integer"):
        load(path)
    path = tiny_llama.write(tmp_path / "other", "plain")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"the directory has no model\.safetensors"):
        load(path)


def test_gguf_in_capitals(tiny_llama, tmp_path):
    assert open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "TINY.GGUF", "plain"))) is not None
