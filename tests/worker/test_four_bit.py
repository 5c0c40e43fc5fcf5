"""Four-bit weights: the codes of GGUF's Q4_0 and Q4_1 as they are, for a few rows at a time."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from helpers.torch_driver import generate, load
from test_weights import write_gguf

from trioengine.worker.kernels.linear import FEW_ROWS, has_four_bit_kernel, join_four_bit, make_linear, wants_four_bit
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.blocks import read_four_bit
from trioengine.worker.weights.files import dequantize_gguf

needs_kernel = pytest.mark.skipif(not has_four_bit_kernel(), reason="this CPU has no four-bit kernel")


def stored(kind, rows, columns):
    """Random weights as the file stores them."""
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    return memoryview(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())


def dequantized(data, kind, shape):
    with ThreadPoolExecutor(1) as executor:
        return dequantize_gguf(data, kind, shape, torch.float32, executor)


def error(result, exact):
    return float((result.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_nothing_is_lost(kind):
    """Codes, scales and minima give what the gguf package gives."""
    data = stored(kind, 48, 96)
    weight = read_four_bit(data, kind, (48, 96))
    assert weight.codes.dtype == torch.uint8 and weight.codes.max() == 15
    assert torch.equal(weight.dequantize(torch.float32), dequantized(data, kind, (48, 96)))


def test_a_matrix_of_many_pieces():
    """More elements than are computed at a time, and rows that do not divide them."""
    data = stored("Q4_1", 1001, 1024)
    weight = read_four_bit(data, "Q4_1", (1001, 1024))
    assert torch.equal(weight.dequantize(torch.bfloat16), dequantized(data, "Q4_1", (1001, 1024)).bfloat16())


@pytest.mark.parametrize(("kind", "shape"), [("Q8_0", (48, 96)), ("F32", (48, 96)), ("Q4_1", (96,))])
def test_other_types_and_vectors_have_no_such_form(kind, shape):
    size = {"Q8_0": 34 * 3 * 48, "F32": 4 * 96 * 48, "Q4_1": 20 * 3}[kind]
    assert read_four_bit(memoryview(bytes(size)), kind, shape) is None


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_as_exact_as_bfloat16(kind, with_bias, rows):
    """Whatever kernel the number of rows chooses, against the product in float32."""
    torch.manual_seed(0)
    data = stored(kind, 960, 576)
    exact = dequantized(data, kind, (960, 576))
    bias = torch.randn(960).bfloat16() if with_bias else None
    x = torch.randn(rows, 2 * 576).bfloat16()[:, :576]  # rows that do not lie one after the other
    expected = F.linear(x.float(), exact, None if bias is None else bias.float())
    plain = error(F.linear(x, exact.bfloat16(), bias), expected)
    linear = make_linear(exact.bfloat16(), bias, read_four_bit(data, kind, (960, 576)))
    assert error(linear(x), expected) < 1.5 * plain


@needs_kernel
def test_the_codes_are_used_for_few_rows_only():
    """A weight whose codes say something else than its values shows which of them was used."""
    data = stored("Q4_1", 32, 64)
    four_bit = read_four_bit(data, "Q4_1", (32, 64))
    linear = make_linear(torch.zeros(32, 64, dtype=torch.bfloat16), None, four_bit)
    assert linear(torch.ones(FEW_ROWS, 64, dtype=torch.bfloat16)).count_nonzero() > 0
    assert linear(torch.ones(FEW_ROWS + 1, 64, dtype=torch.bfloat16)).count_nonzero() == 0


@needs_kernel
def test_what_wants_four_bits():
    """Not float32, where the answer is the reference's token for token; not a shape that the kernel does not take."""
    assert wants_four_bit(torch.zeros(32, 64, dtype=torch.bfloat16))
    assert not wants_four_bit(torch.zeros(32, 64))
    assert not wants_four_bit(torch.zeros(40, 64, dtype=torch.bfloat16))


def test_joined_rows_and_the_rotary_layout(tiny_llama, tmp_path):
    """What the checkpoint gives is in Hugging Face's order of rows, as its tensors are."""
    kinds = {f"model.layers.0.self_attn.{name}_proj.weight": "Q4_1" for name in "qkv"}
    changes = {"hidden_size": 64, "num_hidden_layers": 1}
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "t.gguf", "plain", kinds=kinds, **changes)))
    parts = [checkpoint.read_four_bit(name) for name in kinds]
    values = torch.cat([checkpoint.read(name, torch.float32) for name in kinds])
    whole = join_four_bit(parts)
    assert whole is not None
    assert torch.equal(whole.dequantize(torch.float32), values)
    assert join_four_bit([*parts, None]) is None
    assert checkpoint.read_four_bit("model.layers.0.self_attn.o_proj.weight") is None
    checkpoint.close()


def test_a_whole_model(tiny_llama, tmp_path):
    """Alone (four bits) and in a batch (bfloat16), the model gives nearly the same: each rounds in its own way."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    names = [name for name in tiny_llama.tensors({**tiny_llama.BASE, **config}) if "_proj" in name]
    path = write_gguf(tiny_llama, tmp_path / "t.gguf", "plain", kinds=dict.fromkeys(names, "Q4_1"), **config)
    runner = load(path, dtype="bfloat16")
    prompts = [[(token + offset) % 200 for token in tiny_llama.PROMPT] for offset in range(FEW_ROWS + 8)]
    alone = [generate(runner, [prompt], 2)[0][0] for prompt in prompts]
    together = generate(runner, prompts, 2)[0]
    same = [a == b for a, b in zip(alone, together, strict=True)]  # the second token is the first that few rows compute
    assert sum(same) >= len(prompts) - 1
