"""Every architecture beside Llama, on tiny checkpoints: against transformers, in pieces, in a crowd, and from GGUF."""

import random
import re
from contextlib import closing

import gguf
import numpy as np
import pytest
import torch
from helpers import tiny_decoders
from helpers.random_checkpoint import write_checkpoint
from helpers.tiny_gguf import new_writer, permuted, stored_as
from helpers.tiny_llama import PROMPT
from helpers.torch_driver import generate, load, reference, spoil

from trioengine.core.errors import ModelError
from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy
from trioengine.worker.weights import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
REFERENCE = reference("decoders_reference.json")
DELTA = {
    "rope.dimension_count": 4,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
SHARED = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
IN_GGUF = {  # variants, with the keys of GGUF metadata that config.json has in another form
    "qwen3": {},
    "qwen3-tied": {},
    "qwen2-yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "smollm3": {},
    "granite": {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 2.5},
    "olmo2": {},
    "phi3": {"attention.sliding_window": 40},
    "phi3-partial": {"rope.dimension_count": 6},
    "phi3-long": {
        "rope.dimension_count": 6,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.1547005,
    },
    "lfm2": {"shortconv.l_cache": 3},
    "seed_oss": {},
    "seed_oss-tied": {},
    "ernie4_5": {},
    "ernie4_5-tied": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "gemma3": {"attention.sliding_window": 20},
    "qwen3_5": DELTA,
    "qwen3_5-even": {
        **DELTA,
        "full_attention_interval": 2,
        "ssm.conv_kernel": 2,
        "ssm.state_size": 16,
        "ssm.group_count": 3,
        "ssm.time_step_rank": 3,
        "ssm.inner_size": 108,
    },
    "qwen3_5-moe": {
        **DELTA,
        **SHARED,
        "ssm.group_count": 3,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 48,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_feed_forward_length": 72,
    },
    "qwen3-next": {**DELTA, **SHARED},
    "qwen3-next-groups": {
        **DELTA,
        **SHARED,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 198,
        "rope.dimension_count": 8,
        "expert_used_count": 1,
        "expert_shared_feed_forward_length": 24,
    },
    "qwen3-moe": {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24},
    "olmoe": {"expert_count": 4, "expert_used_count": 2},
}


@pytest.fixture(params=tiny_decoders.VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def runner(tmp_path, variant, options):
    path, max_model_len = tiny_decoders.write(tmp_path, variant), tiny_decoders.MAX_MODEL_LEN.get(variant)
    return load(path, kv_cache_memory=8 << 20, max_model_len=max_model_len, **options)


def test_the_reference_has_no_ties():
    """Its answers do not depend on rounding."""
    assert set(REFERENCE) == set(tiny_decoders.VARIANTS)
    assert min(case["min_gap"] for case in REFERENCE.values()) > 1e-3


@pytest.mark.parametrize("budget", [2048, 33, 7, 1])
def test_greedy_is_that_of_transformers(runner, variant, budget):
    answers, _ = generate(runner, [PROMPT], 48, max_num_batched_tokens=budget, max_num_seqs=1)
    assert answers == [REFERENCE[variant]["output"]]


def test_an_answer_goes_on_from_what_was_delivered(runner, variant):
    """As after the death of a worker, which gets the prompt and the delivered part."""
    output = REFERENCE[variant]["output"]
    for delivered in (1, 17, 47):
        assert generate(runner, [PROMPT + output[:delivered]], 48 - delivered)[0] == [output[delivered:]]


def test_an_answer_is_the_same_after_sleep(runner, variant):
    expected = REFERENCE[variant]["output"][:12]
    assert generate(runner, [PROMPT], 12)[0] == [expected]
    runner.sleep()
    runner.wake(ALL_TAGS)
    for cache in (runner.cache, runner.states):
        if cache is not None:
            spoil(cache)
    assert generate(runner, [PROMPT], 12)[0] == [expected]


def test_logprobs_are_those_of_transformers(runner, variant):
    known = REFERENCE[variant]
    params = ResolvedParams(temperature=0.0, seed=0, logprobs=0, prompt_logprobs=1, max_tokens=1)
    blocks = [3, 1, 4, 2, 9, 6]
    sequence = Sequence(0, 0, list(PROMPT), 90, params, frozenset(), block_table=blocks, window_table=blocks)
    copies = ()
    if runner.states is not None:
        sequence.state_slot, copies = 2, (StateCopy(PADDING_SLOT, 2),)
    entries = []
    for piece in (50, 39, 1):
        rows = runner.execute(SchedulerOutput((ScheduledSequence(sequence, piece),), state_copies=copies))
        copies = ()
        entries += [entry for row in rows for entry in row.prompt_logprobs or ()]
        sequence.num_computed_tokens += piece
    assert rows[-1].logprobs[0] == pytest.approx({known["output"][0]: known["logprob"]}, abs=1e-4)
    found = [entry[token] for entry, token in zip(entries, PROMPT[1:], strict=True)]
    assert found == pytest.approx(known["prompt_logprobs"], abs=1e-4)


def test_a_crowd(runner, variant):
    """32 at once, in chunks, with prefix cache and preemption: each answer is the one it has alone."""
    rng = random.Random(0)
    prompts = [PROMPT] + [PROMPT[:30] + [rng.randrange(200) for _ in range(rng.randrange(60))] for _ in range(31)]
    alone = [generate(runner, [prompt], 12, enable_prefix_caching=False)[0][0] for prompt in prompts]
    assert alone[0] == REFERENCE[variant]["output"][:12]
    limits = {"max_num_batched_tokens": 60, "chunked_prefill_size": 25, "max_num_seqs": 32, "kv_blocks_total": 12}
    together, statistics = generate(runner, prompts, 12, **limits)
    assert together == alone
    assert statistics.num_preemptions > 0
    assert statistics.prefix_cache_hits > 0


def test_bfloat16_runs(tmp_path, variant, options):
    path = tiny_decoders.write(tmp_path, variant)
    runner = load(path, dtype="bfloat16", kv_cache_memory=4 << 20, kv_cache_dtype="int8", **options)
    answers, _ = generate(runner, [PROMPT, PROMPT[:5]], 8)
    assert [len(answer) for answer in answers] == [8, 8]


def test_whether_it_has_experts(tmp_path, variant):
    with closing(open_checkpoint(str(tiny_decoders.write(tmp_path, variant)))) as checkpoint:
        model = checkpoint.config
    assert model.text.has_experts == any(".experts." in name for name in model.wanted_tensors())


def test_the_parts_beside_the_decoder_are_ignored(tmp_path):
    """A vision tower, and layers that predict more tokens."""
    variant = "qwen3_5-vision"
    path, fields = tmp_path / "model", {"config.json": tiny_decoders.config(variant)}
    others = {name: torch.zeros(3) for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight")}
    write_checkpoint(path, fields, tiny_decoders.tensors(variant) | others)
    runner = load(path, kv_cache_memory=8 << 20)
    assert generate(runner, [PROMPT], 12)[0] == [REFERENCE[variant]["output"][:12]]
    write_checkpoint(path, fields, tiny_decoders.tensors(variant) | {"visual.proj.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"unexpected tensors: 'visual\.proj\.weight'"):
        load(path)


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def stacked(tensors):
    """The tensors, with one for each projection of all experts of a layer."""
    stacks = {}
    for name, tensor in tensors.items():
        stacks.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensor)
    return {name: torch.stack(parts) if "experts" in name else parts[0] for name, parts in stacks.items()}


def converted(name, array, config):
    """The array as the conversion writes it for the architecture, by the tensor's Hugging Face name."""
    architecture, kind = config["model_type"], name.rpartition("linear_attn.")[2]
    if architecture in ("granite", "smollm3", "ernie4_5") and ("q_proj" in name or "k_proj" in name):
        return permuted(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    if architecture in tiny_decoders.UNIT_NORMS and name.endswith("norm.weight") and name == kind:
        return array + 1
    if architecture.startswith("qwen3_5") and name != kind and kind != "norm.weight":
        array = tiled(array, kind, config)
    return -np.exp(array) if kind == "A_log" else array


def tiled(array, kind, config):
    """A tensor of a delta net whose heads of values follow each other as heads of keys do, again and again."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if kind == "out_proj.weight":
        return tiled(array.T, "in_proj_z.weight", config).T
    is_whole = kind in ("in_proj_qkv.weight", "conv1d.weight")
    start = 2 * keys * config["linear_key_head_dim"] if is_whole else 0
    heads = array[start:].reshape(keys, values // keys, -1)
    return np.concatenate([array[:start], heads.swapaxes(0, 1).reshape(array[start:].shape)])


def with_joined(variant, tensors):
    """The tensors, of which files of Qwen3-Next have two in one."""
    if not variant.startswith("qwen3-next"):
        return tensors
    whole = tiny_decoders.joined(tiny_decoders.config(variant), tensors)
    separate = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(("in_proj_b.weight", "_a.weight"))
    }
    return separate | {name: tensor for name, tensor in whole.items() if name.endswith("in_proj_ba.weight")}


def write_gguf(path, variant, metadata, kind="F32", **changes):
    """The variant as llama.cpp's conversion writes it, with matrices of this type, but for routers.

    The gguf package has the names of tensors; `changes` are to fields of config.json.
    """
    config = tiny_decoders.config(variant, **changes)
    name = config["model_type"].removesuffix("_text").replace("_moe", "moe").replace("qwen3_", "qwen3")
    if name == "lfm2":
        config["num_key_value_heads"] = [2 * (layer in config["full_attn_idxs"]) for layer in range(6)]
    rope_theta = config.get("rope_parameters", config).get("rope_theta")
    writer = new_writer(path, name, {**config, "rope_theta": rope_theta})
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{name}.{key}", value)
    architecture = next(key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name, tensor in stacked(with_joined(variant, tiny_decoders.tensors(variant, **changes))).items():
        array = converted(hf_name, tensor.numpy(), config).squeeze()
        is_plain = array.ndim == 1 or hf_name.endswith(("mlp.gate.weight", "conv1d.weight"))
        stored_type = gguf.GGMLQuantizationType["F32" if is_plain else kind]
        array = stored_as(np.ascontiguousarray(array), stored_type)
        stored_name = names.get_name(hf_name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        writer.add_tensor(stored_name, array, raw_dtype=stored_type)
    if variant == "phi3-long":
        writer.add_tensor("rope_factors_long.weight", np.array(tiny_decoders.LONG, dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(tiny_decoders.SHORT, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("variant", IN_GGUF)
def test_a_gguf_file_has_the_same_answer(tmp_path, variant):
    runner = load(write_gguf(tmp_path / "tiny.gguf", variant, IN_GGUF[variant]), kv_cache_memory=8 << 20)
    assert generate(runner, [PROMPT], 48)[0] == [REFERENCE[variant]["output"]]


@pytest.mark.parametrize("variant", IN_GGUF)
def test_a_gguf_file_has_the_same_weights(tmp_path, variant):
    """And, but for the divisors of frequencies, the same configuration: either can replace the other's weights."""
    stored = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", variant, IN_GGUF[variant])))
    for name, tensor in tiny_decoders.tensors(variant).items():
        torch.testing.assert_close(stored.read(name, torch.float32), tensor, rtol=0, atol=1e-6)
    if variant != "phi3-long":
        runner = load(tiny_decoders.write(tmp_path / "hf", variant), kv_cache_memory=8 << 20)
        with runner.target.spec.opened(str(tmp_path / "tiny.gguf")):
            pass
    stored.close()


def test_a_layer_of_a_gguf_file_that_predicts_more_tokens_is_ignored(tmp_path):
    """It lies behind the others."""
    variant = "qwen3_5-moe"
    metadata = {**IN_GGUF[variant], "nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "tiny.gguf", variant, metadata, num_hidden_layers=6)
    tensors = tiny_decoders.tensors(variant, num_hidden_layers=6)
    others = {name: tensor for name, tensor in tensors.items() if ".layers.5." not in name}
    directory = write_checkpoint(tmp_path / "model", {"config.json": tiny_decoders.config(variant)}, others)
    found, expected = (load(each, kv_cache_memory=8 << 20) for each in (path, directory))
    assert generate(found, [PROMPT], 12)[0] == generate(expected, [PROMPT], 12)[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("size", [8, 64])
def test_heads_of_values_in_a_gguf_file_of_integers(tmp_path, size, kind):
    """Columns are put in order as integers where heads are whole groups of columns, and else in numbers."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "linear_value_head_dim": size, "head_dim": 64}
    changes |= {"linear_num_value_heads": 512 // size, "num_attention_heads": 4}
    heads = {"ssm.time_step_rank": 512 // size, "ssm.inner_size": 512, "rope.dimension_count": 16}
    path = write_gguf(tmp_path / "tiny.gguf", "qwen3_5", {**DELTA, **heads}, kind, **changes)
    stored = open_checkpoint(str(path))
    tensors = tiny_decoders.tensors("qwen3_5", **changes)
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"):
        name = f"model.layers.0.linear_attn.{name}.weight"
        integers = stored.read_integers(name)
        assert (integers is None) == (size == 8 and "out_proj" in name)
        for found in (stored.read(name, torch.float32), integers and integers.dequantize()):
            if found is not None:
                torch.testing.assert_close(found, tensors[name], rtol=0, atol=0.06)
    stored.close()
