"""Layers with experts in C++: their operations against formulas in float64, and whole layers against one by one."""

import math
import random
from dataclasses import replace

import pytest
import torch
from helpers import tiny_decoders
from helpers.attention_step import assert_close, randn
from helpers.native_shapes import LESS, make
from helpers.random_checkpoint import write_checkpoint
from helpers.torch_driver import load, needs_compiler
from quality import logits_of
from test_architectures import IN_GGUF, write_gguf
from test_batch_invariance import answers, same
from test_native_decoder import load_both as load_both

from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels import Experts, Routing
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.kernels.integer_weights import IntegerWeight
from trioengine.worker.kernels.products import Profile
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

SIZES = [(1, 1), (5, 1), (16, 2), (40, 3), (129, 8)]  # experts, of which so many are chosen


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[None, *LESS], ids=str)
def at_most(request):
    return request.param


@pytest.fixture
def threads():
    count = torch.get_num_threads()
    yield (1, 2, 3)
    torch.set_num_threads(count)


def routed(scores, routing):
    """The choices and the weights, in float64."""
    last = scores.shape[1] - routing.has_shared
    of_all = scores[:, :last].double()
    order = of_all.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen]
    weights = of_all.softmax(dim=-1).gather(1, order)
    if routing.normalizes:
        weights /= weights.sum(dim=-1, keepdim=True)
    if not routing.has_shared:
        return order, weights
    shared = torch.full_like(order[:, :1], last)
    return torch.cat([order, shared], dim=1), torch.cat([weights, scores[:, last:].double().sigmoid()], dim=1)


# ---- the choice of experts, and the sum of their results -------------------------------------------------------------


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize(("experts", "num_chosen"), SIZES)
def test_route(experts, num_chosen, rows, normalizes, has_shared, dtype, at_most):
    """Of all different scores, and of integers, of which many are the same."""
    routing = Routing(num_chosen, normalizes, has_shared)
    scores = randn(rows, experts + has_shared, dtype=dtype) * 3
    for each in (scores, scores.round()):
        order, expected = routed(each, routing)
        for kernels in (make(dtype=dtype, at_most=at_most), TorchKernels(9, dtype)):
            chosen, weights = kernels.route(each, routing)
            assert torch.equal(chosen, order)
            assert_close(weights, expected, torch.float32)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 7, 39])
def test_scores_that_are_no_numbers(place, number, normalizes, at_most):
    """They make the weights of their row nan, and of no other; it has experts nevertheless."""
    scores = randn(5, 40)
    for kernels in (make(at_most=at_most), TorchKernels(9, torch.float32)):
        before = kernels.route(scores, Routing(3, normalizes))
        spoilt = scores.clone()
        spoilt[2, place] = number
        chosen, weights = kernels.route(spoilt, Routing(3, normalizes))
        assert weights[2].isnan().all()
        assert len(set(chosen[2].tolist())) == 3 and 0 <= chosen[2].min() <= chosen[2].max() < 40
        others = [0, 1, 3, 4]
        assert torch.equal(chosen[others], before[0][others])
        assert torch.equal(weights[others], before[1][others])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_the_score_of_the_shared_expert_counts_for_its_own_weight_only(number, at_most):
    scores = randn(5, 41)
    for kernels in (make(at_most=at_most), TorchKernels(9, torch.float32)):
        before = kernels.route(scores, Routing(3, True, has_shared=True))
        spoilt = scores.clone()
        spoilt[2, 40] = number
        chosen, weights = kernels.route(spoilt, Routing(3, True, has_shared=True))
        assert torch.equal(chosen, before[0])
        assert torch.equal(weights[:, :3], before[1][:, :3])
        expected = torch.tensor(number).sigmoid()
        assert torch.equal(weights[2, 3], expected) or (expected.isnan() and weights[2, 3].isnan())


def test_scores_at_the_ends(at_most):
    """The least possible ones are chosen last, and weigh nothing."""
    scores = torch.tensor([[-math.inf, 3e38, -3e38, -math.inf], [-200.0, 0.0, -300.0, 1.0]])
    for kernels in (make(at_most=at_most), TorchKernels(9, torch.float32)):
        chosen, weights = kernels.route(scores, Routing(3, normalizes=True))
        assert chosen.tolist() == [[1, 2, 0], [3, 1, 0]]
        assert weights[0].tolist() == [1.0, 0.0, 0.0]
        assert weights[1, 2] == pytest.approx(0, abs=1e-37)


@pytest.mark.parametrize("size", [1, 16, 40])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("num_chosen", [1, 2, 3, 8])
def test_mix(num_chosen, rows, size, dtype, at_most):
    results, weights = randn(rows, num_chosen, size, dtype=dtype), randn(rows, num_chosen, seed=1)
    expected = (results.double() * weights.double()[..., None]).sum(dim=1)
    for kernels in (make(dtype=dtype, at_most=at_most), TorchKernels(9, dtype)):
        assert_close(kernels.mix(results, weights), expected, dtype)


# ---- all of a layer --------------------------------------------------------------------------------------------------

LARGE = {"hidden_size": 96, "num_attention_heads": 6}
VARIANTS = {
    "qwen3-moe": {**LARGE, "moe_intermediate_size": 64},
    "qwen3-moe-dense": {**LARGE, "intermediate_size": 160, "moe_intermediate_size": 224},
    "qwen3-moe-first": {**LARGE, "moe_intermediate_size": 40},  # products of integers, and behind them of the dtype
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 3},  # which have more rows than a task
    "qwen3-next": {**LARGE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "qwen3-next-some": {**LARGE, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 32},
    "qwen3-next-groups": {**LARGE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 40},
}


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_layer_by_layer(tmp_path, load_both, threads, variant, dtype, quantization):
    path = tiny_decoders.write(tmp_path, variant, **VARIANTS[variant])
    at_once, layer_by_layer = load_both(path, dtype, quantization)
    rng = random.Random(variant)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in (90, 17, 1, 2, 40, 33, 16, 40, 17)]
    lengths = [9, 10, 8, 9, 5, 7, 6, 4, 2]
    expected, _ = answers(layer_by_layer, prompts, lengths)
    for count, chunk in zip(threads, (512, 13, 1), strict=True):
        torch.set_num_threads(count)
        limits = {"chunked_prefill_size": chunk, "max_num_batched_tokens": chunk + 128}
        assert same(answers(at_once, prompts, lengths, **limits)[0], expected)
    forms = {mlp.gate_up.is_integer for mlp in experts_of(at_once)[0].mlps}
    assert forms == {quantization == "int8"}


def test_experts_of_several_forms(tmp_path, load_both, monkeypatch):
    """Only weights that are not finite have no integers; here one of large weights stands for these."""
    monkeypatch.setattr(IntegerWeight, "is_finite", property(lambda weight: bool((weight.scales < 100).all())))
    config, tensors = tiny_decoders.config("olmoe"), tiny_decoders.tensors("olmoe")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = 1e5
    path = write_checkpoint(tmp_path, {"config.json": config}, tensors)
    at_once, layer_by_layer = load_both(path, "float32", "int8")
    forms = [[mlp.gate_up.is_integer for mlp in experts.mlps] for experts in experts_of(at_once)]
    assert forms == [[True] * 4, [True, True, False, True], [True] * 4]
    prompts = [[(7 * i * i + size) % 200 for i in range(size)] for size in (40, 2, 17)]
    assert same(answers(at_once, prompts, [5, 6, 7])[0], answers(layer_by_layer, prompts, [5, 6, 7])[0])


def test_a_token_that_is_no_number_stays_in_its_sequence(tmp_path, threads):
    """Its results are nan; the rows beside it in an expert have the bits that they have alone."""
    config, tensors = tiny_decoders.config("olmoe"), tiny_decoders.tensors("olmoe")
    tensors["model.embed_tokens.weight"][7] = math.nan
    runner = load(write_checkpoint(tmp_path, {"config.json": config}, tensors))
    prompts = [[3, 4, 5, 6], [8, 7, 9], [11, 12, 13, 14, 15]]
    alone = [forward(runner, [prompt])[0] for prompt in prompts]
    for count in threads:
        torch.set_num_threads(count)
        found = forward(runner, prompts)
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()
        assert torch.equal(found[[0, 2]], torch.stack([alone[0], alone[2]]))


def forward(runner, prompts):
    """The hidden states of each prompt's last token, of one step."""
    params = ResolvedParams(temperature=0.0, max_tokens=1, seed=0)
    entries = []
    for number, prompt in enumerate(prompts):
        sequence = Sequence(number, number, prompt, len(prompt), params, frozenset(), block_table=[number])
        entries.append(ScheduledSequence(sequence, len(prompt)))
    batch = make_batch(SchedulerOutput(tuple(entries)), runner.info.block_size)
    batch = replace(batch, sample_rows=batch.output_rows)
    return runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache))


def experts_of(runner):
    mlps = [layer.mlp for layer in runner.model._decoder._weights.layers]
    return [mlp for mlp in mlps if isinstance(mlp, Experts)]


# ---- weights, and the work of a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_gguf_file_of_integers(tmp_path, kind):
    """Experts are multiplied as integers, the router is not; it is nearly what float32 gives."""
    path = write_gguf(tmp_path / "tiny.gguf", "olmoe", IN_GGUF["olmoe"], kind)
    integers, exact = (load(path, "float32", quantization=quantization) for quantization in ("gguf", "none"))
    (first, *_) = experts_of(integers)
    assert {mlp.down.address.bits for mlp in first.mlps} == {{"Q4_1": 4, "Q8_0": 8}[kind]}
    assert first.router.address.bits == 0
    tokens = [(7 * i * i + i) % 200 for i in range(60)]
    found, expected = (logits_of(runner, tokens).log_softmax(dim=-1) for runner in (integers, exact))
    divergence = (expected.exp() * (expected - found)).sum(dim=-1)
    assert 0 < divergence.median() < 0.02  # a few tokens are given to another expert


def test_a_router_is_never_of_integers(tmp_path):
    path = tiny_decoders.write(tmp_path, "olmoe", num_experts=16)
    (first, *_) = experts_of(load(path, quantization="int8"))
    assert first.mlps[0].gate_up.is_integer
    assert not first.router.is_integer


def test_experts_without_rows_cost_nothing(tmp_path):
    """The operations are of the rows of each token's experts, and the bytes of the experts that have rows."""
    runner = load(tiny_decoders.write(tmp_path, "qwen3-moe-dense"))
    profile = runner.target.spec.kernels.products.profile = Profile()
    runner.model.logits(forward(runner, [[5]]))
    parts = profile.parts
    (experts,) = experts_of(runner)  # of the second layer; the fourth is among `mlp_only_layers`
    mlp, one = experts.mlps[0], runner.model._decoder._weights.layers[0].mlp
    assert parts["gate_up"].float_operations == 2 * 48 * (4 * 160 + 3 * 48)
    assert parts["down"].float_operations == 2 * 48 * (4 * 80 + 3 * 24)
    assert parts["gate_up"].weight_bytes == 4 * one.gate_up.weight_bytes + 3 * mlp.gate_up.weight_bytes
    assert parts["router"].float_operations == 2 * 48 * 11
    assert parts["routing"].seconds > 0
