"""All of a decoder in one call: the same bits as layer by layer, with any number of threads."""

import random
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
from helpers import tiny_decoders
from helpers.native_shapes import LESS
from helpers.tiny_gguf import write_gguf
from helpers.torch_driver import load, needs_compiler
from quality import logits_of
from test_batch_invariance import answers, same
from test_scoring import run

from trioengine.core.errors import InvariantError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.batch import EmbeddedRows, make_batch
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.native_decoder import NativeDecoder
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchAttention
from trioengine.worker.native_library import SEGMENT_SIZE
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load_both(monkeypatch):
    """Load a model twice: decoded in one call, and layer by layer."""

    def load_twice(path, dtype, quantization, **config):
        at_once = load(path, dtype, quantization=quantization, **config)
        monkeypatch.setattr(NativeKernels, "decoder", lambda kernels, *shape: LayerByLayer(kernels, *shape))
        return at_once, load(path, dtype, quantization=quantization, **config)

    return load_twice


SHAPES = {
    "plain": {"hidden_size": 96},
    "tied": {"hidden_size": 96},
    "llama3": {"hidden_size": 96},
    "bias": {"hidden_size": 64, "num_hidden_layers": 1},  # queries have 96 columns; it is the last layer at once
}


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", list(SHAPES))
def test_as_layer_by_layer(tiny_llama, tmp_path, load_both, variant, dtype, quantization):
    path = tiny_llama.write(tmp_path / variant, variant, intermediate_size=224, **SHAPES[variant])
    at_once, layer_by_layer = load_both(path, dtype, quantization)
    assert isinstance(at_once.model._decoder, NativeDecoder)
    assert isinstance(layer_by_layer.model._decoder, LayerByLayer)
    rng = random.Random(variant)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in (90, 17, 1, 2, 40, 33, 16, 40, 17)]
    lengths = [9, 10, 8, 9, 5, 7, 6, 4, 2]
    expected, _ = answers(layer_by_layer, prompts, lengths)
    for count, chunk in ((1, 512), (2, 13), (3, 1)):  # chunks without the end of a prompt have no output rows
        torch.set_num_threads(count)
        found, _ = answers(at_once, prompts, lengths, chunked_prefill_size=chunk, max_num_batched_tokens=chunk + 128)
        assert same(found, expected)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize("variant", ["granite", "gemma3", "lfm2-biases", "qwen3_5", "qwen3_5-vision", "qwen3_5-moe"])
def test_scales_states_and_gates_as_layer_by_layer(tmp_path, load_both, variant, dtype, quantization):
    path = tiny_decoders.write(tmp_path, variant)
    at_once, layer_by_layer = load_both(path, dtype, quantization)
    prompts = [[(7 * i * i + size) % 200 for i in range(size)] for size in (40, 2, 17)]
    expected, _ = answers(layer_by_layer, prompts, [5, 6, 7])
    for chunk, count in ((512, 1), (13, 2)):  # one thread computes all heads together
        torch.set_num_threads(count)
        limits = {"chunked_prefill_size": chunk, "max_num_batched_tokens": chunk + 128}
        assert same(answers(at_once, prompts, [5, 6, 7], **limits)[0], expected)


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype"),
    [
        ("float32", "none", "auto"),
        ("bfloat16", "none", "auto"),
        ("float32", "int8", "auto"),
        ("bfloat16", "none", "int8"),
    ],
)
def test_threads_share_long_contexts(tiny_llama, tmp_path, load_both, dtype, quantization, kv_cache_dtype):
    """The bits are those of one operation a call, on any number of threads, alone and beside others."""
    shape = {"hidden_size": 96, "intermediate_size": 224, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    path = tiny_llama.write(tmp_path / "plain", "plain", **shape)
    at_once, layer_by_layer = load_both(path, dtype, quantization, kv_cache_dtype=kv_cache_dtype)
    rng = random.Random(0)
    sizes = (3 * SEGMENT_SIZE + 7, SEGMENT_SIZE - 3, SEGMENT_SIZE, 2 * SEGMENT_SIZE - 1, 5)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in sizes]
    lengths = [6, 8, 2, 4, 9]
    expected, _ = answers(layer_by_layer, prompts, lengths)
    for count, chunk in ((1, 512), (2, 301), (3, 64)):
        torch.set_num_threads(count)
        limits = {"chunked_prefill_size": chunk, "max_num_batched_tokens": chunk + 128}
        for number, prompt in enumerate(prompts):
            alone = [prompt if each == number else None for each in range(len(prompts))]
            assert same(answers(at_once, alone, lengths, **limits)[0][number : number + 1], expected[number:][:1])
        assert same(answers(at_once, prompts, lengths, **limits)[0], expected)
        assert "segment_sums" in at_once.model._decoder._products.scratch._tensors
        at_once.model._decoder._products.scratch.release()


@pytest.mark.parametrize("at_most", [None, *LESS])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize("variant", ["gemma3", "granite", "lfm2-biases", "qwen3_5", "qwen3_5-moe"])
def test_a_token_at_a_time(tmp_path, monkeypatch, variant, dtype, quantization, at_most):
    """Between products each thread computes for itself, if there was room for so many at first, or else its rows."""
    monkeypatch.setattr(NativeKernels, "__init__", partialmethod(NativeKernels.__init__, at_most=at_most))
    runner = load(tiny_decoders.write(tmp_path, variant), dtype, quantization=quantization)
    prompts = [[(7 * i * i + 5) % 200 for i in range(20)]]
    torch.set_num_threads(1)
    expected, _ = answers(runner, prompts, [9])
    for at_first, others in ((3, (2,)), (1, (2, 3, 9))):
        runner.model._decoder._products.release()
        for threads in (at_first, *others):
            torch.set_num_threads(threads)
            assert same(answers(runner, prompts, [9], chunked_prefill_size=1)[0], expected)


def test_a_long_prompt_behind_a_long_context(tiny_llama, tmp_path, load_both):
    """The room for its quantized rows is not that of the segments' sums."""
    shape = {"hidden_size": 96, "intermediate_size": 224, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    path = tiny_llama.write(tmp_path / "plain", "plain", **shape)
    at_once, layer_by_layer = load_both(path, "float32", "int8")
    limits = {"chunked_prefill_size": 2048, "max_num_batched_tokens": 4096}
    for size in (SEGMENT_SIZE + 90, 2048):
        prompts = [[(7 * i * i + size) % 200 for i in range(size)]]
        assert same(answers(at_once, prompts, [3], **limits)[0], answers(layer_by_layer, prompts, [3], **limits)[0])


def test_a_name_of_the_scratch_has_one_dtype(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    scratch = load(path).model._decoder._products.scratch
    scratch.reserve("rows", 8, torch.float32)
    with pytest.raises(InvariantError, match=r"'rows' has torch\.float32, and torch\.uint8 is asked for"):
        scratch.reserve("rows", 8, torch.uint8)


def test_a_long_context_is_as_torch_has_it(tiny_llama, tmp_path):
    shape = {"hidden_size": 96, "intermediate_size": 224, "max_position_embeddings": 2048}
    path = tiny_llama.write(tmp_path / "plain", "plain", **shape)
    tokens = [(7 * i * i + i) % 200 for i in range(3 * SEGMENT_SIZE + 100)]
    native, reference = (logits_of(load(path, "float32", kernels=kernels), tokens) for kernels in ("native", "torch"))
    assert torch.allclose(native, reference, atol=2e-4, rtol=1e-3)


def test_smollm2_as_layer_by_layer(smollm2, load_both):
    at_once, layer_by_layer = load_both(smollm2, "bfloat16", "gguf")
    assert isinstance(at_once.model._decoder, NativeDecoder)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 49_000) for _ in range(size)] for size in (130, 3, 40)]
    assert same(answers(at_once, prompts, [5, 6, 7])[0], answers(layer_by_layer, prompts, [5, 6, 7])[0])


def test_scored_prompts_as_layer_by_layer(tiny_llama, tmp_path, load_both):
    """Then a step has more output rows than sequences."""
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    params = ResolvedParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True, prompt_logprobs=2)
    prompts = [[(7 * i * i + size) % 200 for i in range(size)] for size in (40, 2, 17)]
    at_once, layer_by_layer = (
        run(runner, prompts, params, chunked_prefill_size=16) for runner in load_both(path, "bfloat16", "int8")
    )
    assert at_once[:2] == layer_by_layer[:2]
    assert [len(found) for found in at_once[0]] == [39, 1, 16]


def batch_of(*prompts):
    """The prompts, a block of the cache for each."""
    params = ResolvedParams(temperature=0.0, max_tokens=1, seed=0)
    entries = []
    for number, ids in enumerate(prompts):
        tables = {"block_table": [number], "window_table": [number]}
        entries.append(ScheduledSequence(Sequence(0, number, ids, len(ids), params, frozenset(), **tables), len(ids)))
    return make_batch(SchedulerOutput(tuple(entries)), 16)


def compute(runner, batch):
    """A copy of the results, which the next step overwrites."""
    logits, best = runner.model.compute(batch, runner.target.spec.kernels.attention(batch, runner.cache))
    return logits.clone(), best.logits.tolist(), best.token_ids.tolist()


def forward(runner, batch):
    return runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("variant", ["granite", "gemma3"])
def test_logits_and_best_tokens_in_the_same_call(tmp_path, variant, quantization):
    """As in three calls; of the rows with logits, also of none."""
    runner = load(tiny_decoders.write(tmp_path, variant), quantization=quantization)
    for prompts in ([[5], [6, 7, 8]], [[5] * 9], [[9], [5], [3, 4]], [[6, 7]]):
        batch = batch_of(*prompts)
        logits = runner.model.logits(forward(runner, batch))
        best = runner.target.spec.kernels.best(logits)
        found, *of_best = compute(runner, batch)
        assert found.shape == (len(prompts), runner.info.vocab_size) and torch.equal(found, logits)
        assert of_best == [best.logits.tolist(), best.token_ids.tolist()]
    nothing = replace(batch, sample_rows=torch.empty(0, dtype=torch.int64))
    assert [len(part) for part in compute(runner, nothing)] == [0, 0, 0]


def test_given_embeddings_are_not_scaled(tmp_path):
    """They take the places of their rows' tokens, and are scaled already."""
    runner = load(tiny_decoders.write(tmp_path, "granite"))
    weights = runner.model._decoder._weights
    batch = batch_of([5, 6, 7])
    expected, *best = compute(runner, batch)
    of_six = weights.embedding[6] * weights.embedding_scale
    given = replace(batch_of([5, 9, 7]), embeddings=EmbeddedRows(torch.tensor([1]), of_six[None]))
    found, *of_found = compute(runner, given)
    assert torch.equal(found, expected) and of_found == best


@pytest.mark.parametrize("token_id", [-1, 200, 1 << 40])
def test_a_token_that_has_no_embedding_is_refused(tiny_llama, tmp_path, token_id):
    runner = load(tiny_llama.write(tmp_path / "plain", "plain"))
    before, *_ = compute(runner, batch_of([5], [6]))
    with pytest.raises(InvariantError, match="a token id outside of the 200 of the embedding"):
        compute(runner, batch_of([5], [6, token_id]))
    assert torch.equal(compute(runner, batch_of([5], [6]))[0], before)


def test_memory_of_steps_is_used_again_until_it_is_released(tiny_llama, tmp_path):
    """With as many rows the results are the same tensors; addresses are right after other steps, and after a sleep."""
    runner = load(tiny_llama.write(tmp_path / "plain", "plain"))
    products = runner.model._decoder._products
    few, many = batch_of([5], [6]), batch_of([5, 6, 7, 8] * 4, [7] * 16, [9])
    expected, *_ = compute(runner, few)
    held = products.results.take(2, runner.info.vocab_size)
    assert held is products.results.take(2, runner.info.vocab_size)
    for between in (lambda: compute(runner, many), lambda: forward(runner, many), products.release):
        between()
        assert torch.equal(compute(runner, few)[0], expected)
    assert products.results.take(2, runner.info.vocab_size) is not held
    products.scratch.reserve("wide", 1 << 20, products.dtype)
    assert torch.equal(compute(runner, few)[0], expected)
    products.release()
    assert products.results._latest is None and not len(products.results._memory)


def test_weights_of_other_widths_are_refused(tiny_llama, tmp_path):
    runner = load(tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96))
    weights, kernels = runner.model._decoder._weights, runner.target.spec.kernels
    for wrong in ({"embedding": weights.embedding[:, :95]}, {"head": weights.layers[0].mlp.down}):
        with pytest.raises(InvariantError, match="columns for hidden states of 96"):
            kernels.decoder(runner.model.config, replace(weights, **wrong))


@pytest.mark.parametrize("variant", ["lfm2", "qwen3_5", "qwen3-moe"])
def test_layers_that_are_not_compiled_are_refused(tmp_path, variant):
    """The library of a model has the functions for its kinds of layers alone."""
    runner = load(tiny_decoders.write(tmp_path, variant))
    weights, config = runner.model._decoder._weights, runner.model.config
    shape = config.num_heads, config.num_kv_heads, config.head_dim, torch.float32, 16
    kind = "experts" if variant == "qwen3-moe" else "a state"
    with_states = NativeKernels(*shape, has_states=True, has_experts=False)
    with_experts = NativeKernels(*shape, has_states=False, has_experts=True)
    for kernels, functions in ((with_states, ["convolve", "update_delta"]), (with_experts, ["mix", "route"])):
        names = ("convolve", "mix", "route", "update_delta")
        assert [name for name in names if hasattr(kernels.native, name)] == functions
    its_own, other = (with_experts, with_states) if kind == "experts" else (with_states, with_experts)
    assert isinstance(its_own.decoder(config, weights), NativeDecoder)
    with pytest.raises(InvariantError, match=f"a layer with {kind}, for kernels that were compiled without"):
        other.decoder(config, weights)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_embedding_model_has_no_logits(tiny_llama, tmp_path, kernels):
    """It is refused before keys and values are stored."""
    runner = load(tiny_llama.write(tmp_path / "plain", "plain"), kernels=kernels)
    decoder = runner.target.spec.kernels.decoder(
        runner.model.config, replace(runner.model._decoder._weights, head=None)
    )
    batch = batch_of([5])
    attention = runner.target.spec.kernels.attention(batch, runner.cache)
    before = runner.cache.layers[0].clone()
    with pytest.raises(InvariantError, match="logits of an embedding model, which has no head"):
        decoder.compute(batch, attention)
    assert torch.equal(runner.cache.layers[0], before)
    with pytest.raises(InvariantError, match="logits of an embedding model, which has no head"):
        decoder.logits(decoder.forward(batch, attention))


@pytest.mark.parametrize("change", [lambda t: t.astype("int32"), lambda t: t[:, ::2], lambda t: t[:, :0]])
def test_tables_that_cpp_cannot_read_are_refused(tiny_llama, tmp_path, change):
    runner = load(tiny_llama.write(tmp_path / "plain", "plain"))
    batch = batch_of([5] * 16)
    tables = change(np.zeros((1, 4), dtype="int64"))
    with pytest.raises(InvariantError, match="a native kernel got int"):
        forward(runner, replace(batch, block_tables=tables))


def test_more_output_rows_than_tokens_are_refused(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    runner = load(path, quantization="int8")
    many = replace(batch_of([3]), sample_rows=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvariantError, match="a batch of 1 tokens has 2 output rows"):
        forward(runner, many)


def test_integers_and_other_weights_as_layer_by_layer(tiny_llama, tmp_path, load_both):
    """A hidden size of 48 is no whole number of groups, so that the products of some inputs are of the dtype."""
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=48, intermediate_size=96)
    at_once, layer_by_layer = load_both(path, "float32", "int8")
    mlp = layer_by_layer.model._decoder._weights.layers[0].mlp
    assert (mlp.gate_up.address.bits, mlp.down.address.bits) == (0, 8)
    prompts = [[(7 * i * i + size) % 200 for i in range(size)] for size in (40, 2, 17)]
    assert same(answers(at_once, prompts, [5, 6, 7])[0], answers(layer_by_layer, prompts, [5, 6, 7])[0])


def test_a_file_of_several_types_is_decoded_in_one_call(tiny_llama, tmp_path):
    """As llama.cpp mixes them; projections that share their input are joined. It is nearly what float32 gives."""
    stored = {"q": "Q4_0", "k": "Q4_1", "v": "Q8_0", "o": "Q5_0", "gate": "Q5_1", "up": "Q4_1", "down": "Q8_0"}
    blocks = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
    kinds = {f"model.layers.{i}.{blocks[n]}.{n}_proj.weight": kind for i in range(3) for n, kind in stored.items()}
    path = write_gguf(tiny_llama, tmp_path / "mixed.gguf", "plain", kinds=kinds, hidden_size=96, intermediate_size=224)
    at_once, exact = (load(path, "float32", quantization=quantization) for quantization in ("gguf", "none"))
    assert isinstance(at_once.model._decoder, NativeDecoder)
    rng = random.Random(0)
    tokens = [rng.randrange(3, 200) for _ in range(100)]
    found, expected = (logits_of(runner, tokens).log_softmax(dim=-1) for runner in (at_once, exact))
    divergence = (expected.exp() * (expected - found)).sum(dim=-1)
    assert 0 < divergence.mean() < 0.02  # of logits that differ by tens


def test_the_attention_of_another_backend_is_refused(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    decoder = load(path, quantization="int8").model._decoder
    with pytest.raises(InvariantError, match="the native decoder got another attention"):
        decoder.forward(batch_of([3]), object.__new__(TorchAttention))
