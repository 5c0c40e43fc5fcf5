"""LoRA adapters: their answers are those of merged weights, and each row of a step has its own."""

import random

import pytest
import torch
from helpers import tiny_decoders, tiny_llama
from helpers.mapped import is_mapped
from helpers.tiny_adapter import PEFT, matrices_of, merge, save_adapter, write_adapter
from helpers.tiny_llama import PROMPT
from helpers.torch_driver import backend, generate, load, run

from trioengine.core.errors import ModelError
from trioengine.core.sampling_params import ResolvedParams

pytestmark = pytest.mark.usefixtures("one_thread")
DECODERS = ("qwen3", "phi3", "gemma3", "lfm2", "qwen3_5", "qwen3-moe", "olmo2", "granite", "ernie4_5")
SCORED = ResolvedParams(temperature=0.0, max_tokens=24, seed=0, ignore_eos=True, logprobs=5)


def loaded(path, *adapters, **options):
    """A runner with these adapters, whose ids count from 1."""
    runner = load(path, kv_cache_memory=8 << 20, **options)
    for number, adapter in enumerate(adapters, start=1):
        runner.load_adapter(number, str(adapter))
    return runner


def scored(runner, adapter=0):
    """The greedy answer to PROMPT, and the logprobs of each token."""
    (sequence,), rows, _ = run(runner, [PROMPT], SCORED, {}, [adapter])
    return sequence.output, [list(each.items()) for row in rows for each in row.logprobs or ()]


def assert_same(found, expected):
    """The same tokens, with logprobs to 1e-4, and to 1e-5 of their size."""
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        torch.testing.assert_close([value for _, value in ours], [value for _, value in theirs], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rank", "config"), [(1, {"lora_alpha": 2}), (4, {}), (7, {"use_rslora": True})])
@pytest.mark.parametrize("variant", ["plain", "bias", "qwen2"])
def test_as_merged(tmp_path, options, variant, rank, config):
    path = tiny_llama.write(tmp_path / "base", variant)
    adapter = write_adapter(tmp_path / "adapter", path, rank=rank, **config)
    expected = scored(load(merge(tmp_path / "merged", path, adapter), kv_cache_memory=8 << 20, **options))
    runner = loaded(path, adapter, **options)
    assert_same(scored(runner, 1), expected)
    assert scored(runner)[0] != expected[0], "the adapter changes the answer"


@pytest.mark.parametrize("variant", [name for name in tiny_decoders.VARIANTS if name in DECODERS])
def test_as_merged_in_other_architectures(tmp_path, options, variant):
    path = tiny_decoders.write(tmp_path / "base", variant)
    adapter = write_adapter(tmp_path / "adapter", path)
    expected = scored(load(merge(tmp_path / "merged", path, adapter), kv_cache_memory=8 << 20, **options))
    assert_same(scored(loaded(path, adapter, **options), 1), expected)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_queries_and_keys_in_another_order_are_refused(tmp_path, name):
    """An adapter would change other rows than in PEFT."""
    path = tiny_decoders.write(tmp_path / "base", "ernie4_5")
    matrix = f"base_model.model.model.layers.0.self_attn.{name}"
    rows = {"q_proj": 84, "k_proj": 42}[name]
    tensors = {f"{matrix}.lora_A.weight": torch.ones(2, 48), f"{matrix}.lora_B.weight": torch.ones(rows, 2)}
    adapter = save_adapter(tmp_path / "adapter", PEFT, tensors)
    with pytest.raises(ModelError, match=rf"{name}' is not a matrix of this model that adapters can change"):
        loaded(path, adapter, **backend("torch"))


@pytest.mark.parametrize("targets", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "layers.1."])
def test_of_some_matrices(tmp_path, options, targets):
    path = tiny_llama.write(tmp_path / "base", "plain")
    adapter = write_adapter(tmp_path / "adapter", path, targets=targets)
    expected = scored(load(merge(tmp_path / "merged", path, adapter), kv_cache_memory=8 << 20, **options))
    assert_same(scored(loaded(path, adapter, **options), 1), expected)


@pytest.fixture
def crowd(tmp_path):
    """A checkpoint, two adapters, and prompts of which several begin alike."""
    path = tiny_llama.write(tmp_path / "base", "plain", intermediate_size=96, hidden_size=96)
    adapters = [write_adapter(tmp_path / f"adapter-{seed}", path, seed=seed, rank=seed + 2) for seed in (0, 1)]
    rng = random.Random(0)
    prompts = [PROMPT[:60] + [rng.randrange(3, 200) for _ in range(count)] for count in (1, 9, 30, 2, 17, 4)]
    return path, adapters, prompts


@pytest.mark.parametrize(
    ("dtype", "more"),
    [("float32", {}), ("bfloat16", {}), ("bfloat16", {"quantization": "int8"}), ("float32", {"cuda_graphs": "pad"})],
)
@pytest.mark.parametrize("chunk", [512, 13])
def test_same_bits_in_any_company(crowd, dtype, more, chunk):
    """Also of rows without an adapter, which other steps compute in one call."""
    path, adapters, prompts = crowd
    runner = loaded(path, *adapters, dtype=dtype, **backend("native"), **more)
    alone = [generate(runner, [prompt], 16, adapters=[adapter])[0][0] for adapter in (0, 1, 2) for prompt in prompts]
    together, statistics = generate(
        runner,
        prompts * 3,
        16,
        adapters=[adapter for adapter in (0, 1, 2) for _ in prompts],
        max_num_batched_tokens=chunk + 32,
        chunked_prefill_size=chunk,
    )
    assert together == alone
    assert statistics.prefix_cache_hits > 0
    assert len({tuple(answer) for answer in alone}) > len(prompts)


def test_same_answers_on_any_kernels(crowd, options):
    """In float32, where rounding decides nothing here; with preemption, and with drafts."""
    path, adapters, prompts = crowd
    runner = loaded(path, *adapters, **options)
    wanted = [1, 0, 2, 1, 2, 0]
    alone = [generate(runner, [prompt], 64, adapters=[id])[0][0] for prompt, id in zip(prompts, wanted, strict=True)]
    found, statistics = generate(runner, prompts, 64, adapters=wanted, kv_blocks_total=16, enable_prefix_caching=False)
    assert found == alone
    assert statistics.num_preemptions > 0
    params = ResolvedParams(temperature=0.0, max_tokens=64, seed=0, ignore_eos=True, num_speculative_tokens=4)
    found, statistics = generate(runner, prompts, 64, params, adapters=wanted)
    assert found == alone


def test_dropped_and_loaded_again(crowd):
    path, (first, second), prompts = crowd
    runner = loaded(path, first, **backend("torch"))
    expected = generate(runner, prompts[:1], 8, adapters=[1])[0]
    runner.drop_adapter(1)
    with pytest.raises(KeyError):
        generate(runner, prompts[:1], 8, adapters=[1])
    runner.load_adapter(2, str(second))
    runner.load_adapter(3, str(first))
    assert generate(runner, prompts[:1], 8, adapters=[3])[0] == expected
    assert generate(runner, prompts[:1], 8, adapters=[2])[0] != expected


def test_memory_of_a_dropped_adapter_is_given_back(crowd):
    path, (first, second), _ = crowd
    runner = loaded(path, first, **backend("native"))
    runner.load_adapter(2, str(second))
    addresses = [
        {of.down.address.data for parts in each.values() for of in parts} for each in runner._adapters.values()
    ]
    assert all(map(is_mapped, addresses[0] | addresses[1]))
    runner.drop_adapter(1)
    assert not any(map(is_mapped, addresses[0]))
    assert all(map(is_mapped, addresses[1]))


# ---- refused ---------------------------------------------------------------------------------------------------------


def tensors_for(path):
    """The tensors of an adapter of one matrix."""
    (name, (rows, columns)) = next(iter(matrices_of(path).items()))
    return {
        f"base_model.model.{name}.lora_A.weight": torch.ones(2, columns),
        f"base_model.model.{name}.lora_B.weight": torch.ones(rows, 2),
    }


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"peft_type": "IA3"}, r"adapter_config.json: peft_type must be LORA, got 'IA3'"),
        ({"bias": "all"}, r"bias 'all' is not supported; supported: none"),
        ({"use_dora": True}, r"use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is not supported"),
        ({"lora_alpha": "much"}, r"lora_alpha must be a number above 0"),
        ({"alpha_pattern": {"q_proj": -1}}, r"alpha_pattern.q_proj must be a number above 0"),
        ({"alpha_pattern": {r"layers\.[0-9]+\.q_proj": 4}}, r"is not supported; supported: names of modules"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights must leave the model's own weights as they are"),
    ],
)
def test_a_configuration_is_refused(tmp_path, path, config, error):
    adapter = save_adapter(tmp_path / "adapter", PEFT | config, tensors_for(path))
    with pytest.raises(ModelError, match=error):
        loaded(path, adapter, **backend("torch"))


def changed(tensors, change):
    down, up = tensors
    match change:
        case "no lora_B":
            del tensors[up]
        case "another tensor":
            tensors["base_model.model.lm_head.weight"] = torch.ones(2, 2)
        case "only lora_B":
            del tensors[down]
        case "other sizes":
            tensors[up] = torch.ones(3, 2)
        case "unknown":
            tensors[down.replace("q_proj", "x_proj")] = tensors.pop(down)
        case "the head":
            tensors |= {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
        case "too many":
            tensors |= {down: torch.ones(200, 48), up: torch.ones(48, 200)}
        case "integers":
            tensors[up] = tensors[up].to(torch.int8)
        case "not finite":
            tensors[up][0, 0] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("no lora_B", r"'model.layers.0.self_attn.q_proj' has lora_A, and no lora_B"),
        ("only lora_B", r"lora_B.weight' where pairs of lora_A and lora_B were expected"),
        ("another tensor", r"'base_model.model.lm_head.weight' where pairs"),
        ("other sizes", r"lora_A \[2, 48\] and lora_B \[3, 2\], which do not fit a matrix \[48, 48\]"),
        ("unknown", r"'model.layers.0.self_attn.x_proj' is not a matrix of this model that adapters can change"),
        ("the head", r"'lm_head' is not a matrix of this model"),
        ("too many", r"lora_A \[200, 48\] and lora_B \[48, 200\], which do not fit a matrix \[48, 48\]"),
        ("integers", r"lora_B.weight has the type I8; supported: F32, F16, BF16"),
        ("not finite", r"lora_B.weight has numbers that are not finite"),
    ],
)
def test_tensors_are_refused(tmp_path, path, change, error):
    adapter = save_adapter(tmp_path / "adapter", PEFT, changed(tensors_for(path), change))
    with pytest.raises(ModelError, match=error):
        loaded(path, adapter, **backend("torch"))


def test_experts_and_missing_files_are_refused(tmp_path):
    path = tiny_decoders.write(tmp_path / "base", "olmoe")
    names = matrices_of(path)
    assert not any("experts" in name or name.endswith("mlp.gate") for name in names)
    with pytest.raises(ModelError, match=r"adapter_config.json: No such file"):
        loaded(path, tmp_path / "nowhere", **backend("torch"))
