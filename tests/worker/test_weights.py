"""Model files: sharded safetensors, configurations, and files that lie."""

import json
import math
import os
import struct

import pytest
import torch
from helpers.torch_driver import generate, load, reference
from safetensors.torch import load_file, save_file

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import HF_ARCHITECTURES
from trioengine.hub.llama_config import config_from_hf
from trioengine.hub.model_config import Fields
from trioengine.worker.weights import open_checkpoint

EXPECTED = reference("tiny_reference.json")


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


def test_linear_scaling_under_its_old_name(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "plain", rope_scaling={"type": "linear", "factor": 4.0})
    assert generate(load(path), [tiny_llama.PROMPT], 48)[0] == [EXPECTED["linear"]["output"]]
