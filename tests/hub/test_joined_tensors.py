"""Tensors that a directory has in place of several: stacks of experts, and interleaved projections; or rotary pairs."""

import pytest
import torch
from helpers import tiny_decoders
from helpers.random_checkpoint import write_checkpoint

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import read_safetensors
from trioengine.worker.weights import open_checkpoint

STACK = "model.layers.1.mlp.experts.gate_up_proj"
KEYS = "model.layers.1.self_attn.k_proj.weight"
QKVZ = "model.layers.0.linear_attn.in_proj_qkvz.weight"


def stored(variant, **changes):
    """config.json, and the tensors of a directory; None leaves one out."""
    fields = tiny_decoders.config(variant)
    tensors = tiny_decoders.joined(fields, tiny_decoders.tensors(variant)) | changes
    return {"config.json": fields}, {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["qwen3-next-groups", "qwen3_5-moe", "qwen3_5-moe-vision", "ernie4_5"])
def test_the_parts_are_read(tmp_path, variant, dtype):
    """They are in memory of their own, which ends with them."""
    checkpoint = open_checkpoint(str(tiny_decoders.write(tmp_path, variant)))
    for name, tensor in tiny_decoders.tensors(variant).items():
        part = checkpoint.read(name, dtype)
        assert torch.equal(part, tensor.to(dtype))
        assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
        assert checkpoint.tensors[name].nbytes == tensor.nbytes
    checkpoint.close()


@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3_5-moe"])
def test_each_part_may_have_a_tensor_of_its_own(tmp_path, variant):
    fields = {"config.json": tiny_decoders.config(variant)}
    path = write_checkpoint(tmp_path, fields, tiny_decoders.tensors(variant))
    assert all(tensor.rows is None for tensor in read_safetensors(path).tensors.values())


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3_5-moe", {STACK: torch.zeros(7, 48, 48)}, f"tensor {STACK} has the shape [7, 48, 48], not [8, 48, 48]"),
        ("qwen3_5-moe", {STACK: torch.zeros(())}, f"tensor {STACK} has the shape [], not [8, 48, 48]"),
        ("qwen3_5-moe", {STACK: torch.zeros(8, 48, 47)}, f"tensor {STACK} has the shape [8, 48, 47], not [8, 48, 48]"),
        ("qwen3_5-moe", {STACK: torch.zeros(48, 8, 48)}, f"tensor {STACK} has the shape [48, 8, 48], not [8, 48, 48]"),
        ("qwen3_5-moe", {STACK: torch.zeros(384, 48)}, f"tensor {STACK} has the shape [384, 48], not [8, 48, 48]"),
        ("qwen3_5-moe", {STACK: None}, "missing tensors: 'model.layers.1.mlp.experts.0.gate_proj.weight'"),
        (
            "qwen3_5-moe",
            {"model.layers.1.mlp.experts.2.up_proj.weight": torch.zeros(24, 48)},
            f"tensors '{STACK}' and 'model.layers.1.mlp.experts.2.up_proj.weight' are the same one",
        ),
        ("ernie4_5", {KEYS: torch.zeros(40, 48)}, f"tensor {KEYS} has the shape [40, 48], not [42, 48]"),
        ("ernie4_5", {KEYS: None}, f"missing tensors: '{KEYS}'"),
        ("qwen3-next", {QKVZ: torch.zeros(111, 48)}, f"tensor {QKVZ} has the shape [111, 48], not [112, 48]"),
        ("qwen3-next", {QKVZ: torch.zeros(112)}, f"tensor {QKVZ} has the shape [112], not [112, 48]"),
    ],
)
def test_a_joined_tensor_that_does_not_fit(tmp_path, variant, changes, message):
    path = write_checkpoint(tmp_path, *stored(variant, **changes))
    with pytest.raises(ModelError) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(f"{path}: {message}")
