"""The configurations of decoders beside Llama: each field in each of its forms, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import GGUF_ARCHITECTURES, HF_ARCHITECTURES
from trioengine.hub.model_config import Fields, StatePart
from trioengine.hub.rope_config import RopeScaling, RopeType

BASE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
COUNT = "must be an integer from 1 to 2147483647"
LAYER_TYPES = "layer_types must be 4 of full_attention, sliding_attention"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SHORT, LONG = [1.0, 1.5, 2.0, 3.0], [2.0, 4.0, 8.0, 16.0]
ABSENT = {"num_key_value_heads": ..., "head_dim": ...}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24}


def read(model_type, **fields):
    values = {name: value for name, value in {**BASE, **fields}.items() if value is not ...}
    return HF_ARCHITECTURES[model_type](Fields(Path("config.json"), {"model_type": model_type, **values}), 1000)


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("llama", {"sliding_window": 9}, (None,) * 4),
        ("qwen2", {"sliding_window": 9}, (None,) * 4),  # which transformers ignores
        ("qwen2", {**WINDOWS, "max_window_layers": 1}, (None, 24, 24, 24)),
        ("qwen2", {**WINDOWS, "max_window_layers": 0}, (24,) * 4),
        ("qwen2", WINDOWS, (None,) * 4),  # from layer 28 on
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ("qwen3", {**WINDOWS, "layer_types": [SLIDING, FULL, FULL, SLIDING]}, (24, None, None, 24)),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("smollm3", {}, (None,) * 4),
        ("smollm3", {**WINDOWS, "no_rope_layers": [1, 0, 1, 0, 0]}, (None, 24, None, 24)),
        ("phi3", {}, (None,) * 4),
        ("phi3", {"sliding_window": 7}, (7,) * 4),
        ("qwen3_moe", {"sliding_window": 9}, (None,) * 4),
        ("qwen3_moe", {"use_sliding_window": True}, (4096,) * 4),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ("gemma3_text", {"sliding_window_pattern": 2}, (4096, None, 4096, None)),
        ("gemma3_text", {"sliding_window": 5}, (5,) * 4),  # the sixth layer sees all
        ("gemma3_text", {"layer_types": [FULL] * 4}, (None,) * 4),
    ],
)
def test_the_windows(model_type, fields, windows):
    assert read(model_type, **fields).windows == windows


@pytest.mark.parametrize(
    ("fields", "rotates"),
    [
        ({}, (True, True, True, False)),
        ({"no_rope_layer_interval": 2}, (True, False, True, False)),
        ({"no_rope_layers": [1, 0, 0, 1, 1]}, (True, False, False, True)),
    ],
)
def test_the_layers_that_rotate(fields, rotates):
    assert read("smollm3", **fields).rotates == rotates


@pytest.mark.parametrize(
    ("fields", "has_experts"),
    [
        ({}, (True,) * 4),
        ({"mlp_only_layers": None}, (True,) * 4),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3, 9]}, (False, True, False, False)),
        ({"decoder_sparse_step": 5}, (False,) * 4),
    ],
)
def test_the_layers_with_experts(fields, has_experts):
    config = read("qwen3_moe", num_experts=3, num_experts_per_tok=2, **fields)
    assert config.has_experts == has_experts
    wanted = config.wanted_tensors()
    for index, has in enumerate(has_experts):
        mlp = f"model.layers.{index}.mlp."
        names = {name.removeprefix(mlp) for name in wanted if name.startswith(mlp)}
        projections = {f"{name}_proj.weight" for name in ("gate", "up", "down")}
        of_experts = {f"experts.{expert}.{name}" for expert in range(3) for name in projections}
        assert names == ({"gate.weight"} | of_experts if has else projections)


def test_the_shapes_of_experts():
    """Of Qwen3-MoE they have a size of their own, of OLMoE the intermediate one."""
    for model_type, size in (("qwen3_moe", 768), ("olmoe", 48)):
        wanted = read(model_type, num_experts=9).wanted_tensors()
        assert wanted["model.layers.1.mlp.gate.weight"] == (9, 32)
        assert wanted["model.layers.1.mlp.experts.8.up_proj.weight"] == (size, 32)
        assert wanted["model.layers.1.mlp.experts.8.down_proj.weight"] == (32, size)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_the_names_of_the_number_of_experts(model_type):
    """In published files, and in files of transformers 5."""
    assert read(model_type, num_experts=9).num_experts == 9
    assert read(model_type, num_local_experts=9).num_experts == 9
    assert read(model_type).num_experts == {"qwen3_moe": 128, "olmoe": 64}[model_type]


def test_defaults_are_those_of_transformers():
    gemma, smollm, qwen = read("gemma3_text"), read("smollm3"), read("qwen3")
    assert (gemma.head_dim, gemma.query_pre_attn_scalar, gemma.rms_norm_eps) == (256, 256.0, 1e-6)
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.tie_word_embeddings) == (1e6, 1e4, True)
    assert (smollm.rope_theta, smollm.tie_word_embeddings) == (2e6, True)
    assert (qwen.head_dim, qwen.tie_word_embeddings, qwen.attention_bias) == (128, False, False)
    assert read("olmo2").rms_norm_eps == read("phi3").rms_norm_eps == read("olmoe").rms_norm_eps == 1e-5
    moe, olmoe = read("qwen3_moe", num_key_value_heads=...), read("olmoe", num_key_value_heads=...)
    assert (moe.num_kv_heads, moe.head_dim, moe.num_experts_per_tok, moe.norm_topk_prob) == (4, 8, 8, False)
    assert (olmoe.num_kv_heads, olmoe.num_experts_per_tok, olmoe.norm_topk_prob) == (4, 8, False)
    seed, nulls = read("seed_oss", num_attention_heads=8, **ABSENT), read("seed_oss", **dict.fromkeys(ABSENT))
    assert (seed.num_kv_heads, seed.head_dim, nulls.num_kv_heads, nulls.head_dim) == (8, 128, 4, 8)
    assert (seed.attention_bias, seed.output_bias, seed.mlp_bias) == (True, False, False)
    assert (seed.tie_word_embeddings, seed.rope_theta) == (False, 1e4)
    granite = read("granite")
    assert granite.embedding_multiplier == granite.attention_multiplier == 1.0
    assert granite.residual_multiplier == granite.logits_scaling == 1.0


@pytest.mark.parametrize(
    ("fields", "attends"),
    [
        ({}, (False, False, False, True)),
        ({"full_attention_interval": 2}, (False, True, False, True)),
        ({"layer_types": [FULL, LINEAR, LINEAR, FULL]}, (True, False, False, True)),
    ],
)
def test_the_layers_of_qwen3_5(fields, attends):
    config = read("qwen3_5_text", **fields)
    assert config.attends == attends
    assert config.num_kv_layers == sum(attends)
    convolved, matrices = StatePart((3, 8192)), StatePart((32, 128, 128), is_float32=True)
    assert config.state_parts == (convolved, matrices) * (4 - sum(attends))


@pytest.mark.parametrize(
    ("fields", "attends"),
    [
        ({}, (True,) * 4),
        ({"full_attn_idxs": [1, 3]}, (False, True, False, True)),
        ({"layer_types": ["conv", "conv", FULL, "conv"], "full_attn_idxs": [0]}, (False, False, True, False)),
    ],
)
def test_the_layers_of_lfm2(fields, attends):
    config = read("lfm2", conv_L_cache=5, **fields)
    assert config.attends == attends
    assert config.num_kv_layers == attends.count(True)
    assert config.state_parts == (StatePart((4, 32)),) * attends.count(False)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 256),  # two thirds, in whole multiples
        ({"block_multiple_of": 10}, 40),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.5}, 50),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": None}, 32),
        ({"block_auto_adjust_ff_dim": False}, 48),
        ({"block_auto_adjust_ff_dim": False, "block_ff_dim": 60}, 60),
    ],
)
def test_the_gates_of_lfm2(fields, size):
    assert read("lfm2", **fields).intermediate_size == size


def test_the_head_of_lfm2():
    """The older name of the field comes first, as in transformers."""
    assert read("lfm2").tie_word_embeddings
    assert not read("lfm2", tie_word_embeddings=False).tie_word_embeddings
    assert read("lfm2", tie_embedding=True, tie_word_embeddings=False).tie_word_embeddings
    assert (read("lfm2").rope_theta, read("lfm2").rms_norm_eps) == (1e6, 1e-5)


def test_the_text_of_a_model_with_a_vision_tower():
    alone = read("qwen3_5_text", tie_word_embeddings=True)
    whole = read("qwen3_5", **dict.fromkeys(BASE, ...), text_config=BASE, tie_word_embeddings=True)
    assert replace(whole, model_type="qwen3_5_text") == alone
    prefix = "model.language_model."
    names = [name.replace("model.", prefix, 1) for name in alone.wanted_tensors()]
    assert list(whole.wanted_tensors()) == names
    untied = read("qwen3_5", text_config={**BASE, "tie_word_embeddings": False}, tie_word_embeddings=True)
    assert "lm_head.weight" in untied.wanted_tensors()


@pytest.mark.parametrize(
    ("fields", "rotary_dim"),
    [
        ({}, 64),
        ({"head_dim": 32}, 8),
        ({"partial_rotary_factor": 0.5}, 128),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}, 256),
    ],
)
def test_the_rotated_part_of_qwen3_5(fields, rotary_dim):
    config = read("qwen3_5_text", **fields)
    assert (config.rotary_dim, config.rope_theta) == (rotary_dim, 1e4)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
)
def test_the_two_rotations_of_gemma(fields):
    """In old config.json files, and in new ones."""
    config = read("gemma3_text", **fields)
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 2e4)
    assert config.rope_scaling == RopeScaling.linear(8.0)


@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("output", [True, False])
def test_the_biases_of_seed_oss(queries, output):
    """Queries, keys and values have a field, and the attention's output another."""
    wanted = read("seed_oss", attention_bias=queries, attention_out_bias=output).wanted_tensors()
    biases = {name.split(".")[-2] for name in wanted if name.endswith(".bias")}
    assert biases == {*["q_proj", "k_proj", "v_proj"] * queries, *["o_proj"] * output}


def test_yarn_extends_the_context():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = read("qwen2", rope_scaling=yarn)
    assert config.max_position_embeddings == 1024
    assert config.rope_scaling == RopeScaling(RopeType.YARN, 4.0, 256)
    assert read("qwen2", rope_scaling={**yarn, "factor": 3e38}).max_position_embeddings == 2**31 - 1
    named = read("qwen2", rope_scaling={**yarn, "original_max_position_embeddings": 64})
    assert named.max_position_embeddings == 256
    both = {"original_max_position_embeddings": 64, **yarn}
    assert read("qwen2", rope_scaling=both, original_max_position_embeddings=32).max_position_embeddings == 256
    scaled = read("qwen2", rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16})
    assert (scaled.rope_scaling.attention_factor, scaled.rope_scaling.beta_fast) == (1.0, 16)


def test_dynamic_scaling_begins_behind_the_context():
    assert read("llama", rope_scaling={"type": "dynamic", "factor": 2.0}).rope_scaling == RopeScaling()


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope(name):
    scaling = {"type": name, "short_factor": SHORT, "long_factor": LONG}
    config = read("phi3", rope_scaling=scaling, original_max_position_embeddings=64)
    expected = RopeScaling(RopeType.LONGROPE, 4.0, 64, short_factor=tuple(SHORT), long_factor=tuple(LONG))
    assert (config.rope_scaling, config.rotary_dim) == (expected, 8)
    assert read("phi3", rope_scaling={**scaling, "factor": 2.0}).rope_scaling.factor == 2.0
    assert read("phi3", rope_scaling=scaling).rope_scaling.original_max_position_embeddings == 4096
    assert read("phi3", partial_rotary_factor=0.75).rotary_dim == 6
    assert read("phi3", head_dim=16).rotary_dim == 16
    assert read("phi3", rope_parameters={"partial_rotary_factor": 0.75, "rope_type": "default"}).rotary_dim == 6


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen2", {"layer_types": [SLIDING] * 4}, f"sliding_window {COUNT}, got None"),
        ("qwen2", {"layer_types": 3}, f"{LAYER_TYPES}, got 3"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, f"{LAYER_TYPES}, got ['linear_attention'"),
        ("qwen2", {"layer_types": [FULL] * 5}, LAYER_TYPES),
        ("qwen2", {**WINDOWS, "max_window_layers": -1}, "max_window_layers must be an integer from 0 to 2147483647"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
        *(
            (kind, {"num_key_value_heads": ...}, f"num_key_value_heads {COUNT}, got None")
            for kind in ("qwen2", "qwen3")
        ),
        ("mistral", {"num_key_value_heads": ...}, f"num_key_value_heads {COUNT}, got None"),
        *(
            (kind, {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most the number of tensors, 1000")
            for kind in (
                *("qwen2", "qwen3", "mistral", "smollm3", "phi3", "gemma3_text", "granite", "olmo2"),
                *("qwen3_moe", "olmoe", "qwen3_5_text", "seed_oss"),
            )
        ),
        ("mistral", {"sliding_window": "4096"}, f"sliding_window {COUNT}, got '4096'"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must be at least 4 of 0 and 1, got [1, 2, 1, 1]"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be at least 4 of 0 and 1, got [1]"),
        ("smollm3", {"no_rope_layer_interval": 0}, f"no_rope_layer_interval {COUNT}, got 0"),
        ("seed_oss", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias must be true or false, got 'no'"),
        ("seed_oss", {"num_key_value_heads": ...}, "num_key_value_heads must divide the number of heads, 4, got 8"),
        ("granite", {"residual_multiplier": "1"}, "residual_multiplier must be a number above 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
        (
            "phi3",
            {"partial_rotary_factor": 0.4},
            "the rotation must turn an even number of a head's 8 elements, got 3",
        ),
        (
            "phi3",
            {"partial_rotary_factor": 0.1},
            "the rotation must turn an even number of a head's 8 elements, got 0",
        ),
        ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor must be at most 1, got 2.0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        (
            "qwen3",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor must be 1",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT}},
            "rope_scaling.long_factor must be 4 numbers, got None",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT[:2], "long_factor": LONG}},
            "rope_scaling.short_factor must be 4 numbers",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1},
            "original_max_position_embeddings must be at least 2, got 1",
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor must be a number above 0"),
        (
            "qwen2",
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}},
            "the base of rotary positions must be above 1 for yarn, got 1",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 4, "rope_theta": 1.0}}},
            "the base of rotary positions must be above 1 for yarn, got 1",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1}},
            "rope_scaling.original_max_position_embeddings must be at least 2, got 1",
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 1e-320}}, "rope_scaling.factor must be a number above 0"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "beta_fast": 1e-320}}, "rope_scaling.beta_fast must be a number"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type must be default, got 'linear'",
        ),
        (
            "gemma3_text",
            {"hidden_activation": "silu"},
            "hidden_activation 'silu' is not supported; supported: gelu_pytorch_tanh",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, "rope_parameters.full_attention must be an object, got 3"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ("olmoe", {"num_experts": 0}, "num_experts must be an integer from 1"),
        ("olmoe", {"num_experts": 7}, "num_experts_per_tok must be at most the number of experts, 7, got 8"),
        ("qwen3_moe", {"num_experts": 1 << 14}, "num_experts must be at most 5461 in 4 layers, got 16384"),
        ("qwen3_moe", {"num_local_experts": 2**31 - 1}, "num_local_experts must be at most 5461 in 4 layers"),
        ("qwen3_moe", {"num_experts_per_tok": "8"}, f"num_experts_per_tok {COUNT}, got '8'"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, f"moe_intermediate_size {COUNT}, got 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, f"decoder_sparse_step {COUNT}, got 0"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers, got [True]"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": "9"}, f"sliding_window {COUNT}, got '9'"),
        ("lfm2", {"layer_types": [SLIDING] * 4}, f"layer_types must be 4 of full_attention, conv, got ['{SLIDING}'"),
        ("lfm2", {"layer_types": [FULL] * 3}, "layer_types must be 4 of full_attention, conv"),
        ("lfm2", {"full_attn_idxs": []}, "a model without a layer of attention is not supported"),
        ("lfm2", {"full_attn_idxs": [True]}, "full_attn_idxs must be a list of layers, got [True]"),
        ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs must be a list of layers, got 2"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be from 2 to 64, got 1"),
        ("lfm2", {"conv_L_cache": 65}, "conv_L_cache must be from 2 to 64, got 65"),
        ("lfm2", {"conv_bias": 1}, "conv_bias must be true or false, got 1"),
        ("lfm2", {"block_multiple_of": 0}, f"block_multiple_of {COUNT}, got 0"),
        ("lfm2", {"norm_eps": 0}, "norm_eps must be a number above 0"),
        (
            "qwen3_5_text",
            {"layer_types": [SLIDING] * 4},
            f"layer_types must be 4 of full_attention, linear_attention, got ['{SLIDING}'",
        ),
        ("qwen3_5_text", {"layer_types": [FULL] * 3}, "layer_types must be 4 of full_attention, linear_attention"),
        (
            "qwen3_5_text",
            {"full_attention_interval": 5},
            "a model without a layer of attention is not supported",
        ),
        ("qwen3_5_text", {"full_attention_interval": 0}, f"full_attention_interval {COUNT}, got 0"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate must be true, got False"),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3},
            "linear_num_value_heads must be a multiple of the heads of keys, 3, got 32",
        ),
        ("qwen3_5_text", {"linear_key_head_dim": 257}, "linear_key_head_dim must be at most 256, got 257"),
        ("qwen3_5_text", {"linear_value_head_dim": 512}, "linear_value_head_dim must be at most 256, got 512"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be from 2 to 64, got 1"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be from 2 to 64, got 65"),
        ("qwen3_5_text", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
        (
            "qwen3_5_text",
            {"head_dim": 20},
            "the rotation must turn an even number of a head's 20 elements, got 5",
        ),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ("qwen3_5", {"text_config": 3}, "text_config must be an object, got 3"),
        (
            "qwen3_5",
            {"text_config": {**BASE, "linear_key_head_dim": "8"}},
            f"text_config.linear_key_head_dim {COUNT}, got '8'",
        ),
    ],
)
def test_a_bad_field_is_named(model_type, fields, message):
    with pytest.raises(ModelError) as caught:
        read(model_type, **fields)
    assert str(caught.value).startswith(f"config.json: {message}")


GGUF = {
    "context_length": 256,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
SHAPES = {"token_embd.weight": (100, 32), **{f"blk.{index}.attn_norm.weight": (32,) for index in range(62)}}


def read_gguf(name, **keys):
    metadata = {f"{name}.{key}": value for key, value in {**GGUF, **keys}.items()}
    return GGUF_ARCHITECTURES[name].config(metadata, SHAPES, Path("some.gguf"))


def test_the_scales_of_gguf_files():
    """llama.cpp's own, where the file names none."""
    assert read_gguf("granite").attention_multiplier == 8**-0.5
    assert read_gguf("gemma3", **{"attention.sliding_window": 9}).query_pre_attn_scalar == 8
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0}
    assert read_gguf("qwen3", **yarn).rope_scaling.attention_factor == pytest.approx(2 * (1 + 0.1 * math.log(4)))


def test_the_scale_of_queries_in_gemma():
    """The largest model is recognized by its layers, as in llama.cpp."""
    gemma = {"attention.sliding_window": 9, "attention.key_length": 16}
    assert read_gguf("gemma3", **gemma).query_pre_attn_scalar == 16
    assert read_gguf("gemma3", **gemma, block_count=62).query_pre_attn_scalar == 8


def test_experts_of_gguf_files():
    """llama.cpp fixes whether their probabilities are divided by their sum."""
    counts = {"expert_count": 6, "expert_used_count": 2}
    qwen = read_gguf("qwen3moe", **counts, expert_feed_forward_length=16)
    assert (qwen.model_type, qwen.num_experts, qwen.num_experts_per_tok) == ("qwen3_moe", 6, 2)
    assert (qwen.moe_intermediate_size, qwen.norm_topk_prob, qwen.has_experts) == (16, True, (True,) * 4)
    olmoe = read_gguf("olmoe", **counts)
    assert (olmoe.moe_intermediate_size, olmoe.norm_topk_prob) == (48, False)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3moe", {"expert_count": 6}, f"qwen3moe.expert_feed_forward_length {COUNT}, got None"),
        ("olmoe", {"expert_count": 6}, f"olmoe.expert_used_count {COUNT}, got None"),
        (
            "olmoe",
            {"expert_count": 6, "expert_used_count": 7},
            "olmoe.expert_used_count must be at most the number of experts, 6, got 7",
        ),
        (
            "olmoe",
            {"expert_count": 5462, "expert_used_count": 7},
            "olmoe.expert_count must be at most 5461 in 4 layers, got 5462",
        ),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv is not supported"),
        ("lfm2", {"shortconv.l_cache": 3}, "a model without a layer of attention is not supported"),
        ("gemma3", {}, f"gemma3.attention.sliding_window {COUNT}, got None"),
        ("granite", {"residual_scale": "x"}, "granite.residual_scale must be a number above 0"),
        (
            "phi3",
            {"rope.dimension_count": 9},
            "the rotation must turn an even number of a head's 8 elements, got 9",
        ),
        ("phi3", {"rope.dimension_count": 10}, "the rotation must turn an even number of a head's 8 elements, got 10"),
        (
            "phi3",
            {"rope.dimension_count": 8, "attention.key_length": 2},
            "the rotation must turn an even number of a head's 2 elements, got 8",
        ),
        *(
            (kind, {"block_count": 2**31 - 1}, f"{kind}.block_count must be at most the number of tensors, 63")
            for kind in ("gemma3", "smollm3", "phi3", "qwen3", "qwen3moe", "olmoe", "lfm2", "seed_oss")
        ),
        ("smollm3", {"block_count": "4"}, f"smollm3.block_count {COUNT}, got '4'"),
        ("qwen3", {"rope.dimension_count": 4}, "qwen3.rope.dimension_count must be the size of a head, 8, got 4"),
    ],
)
def test_a_bad_key_is_named(name, keys, message):
    with pytest.raises(ModelError) as caught:
        read_gguf(name, **keys)
    assert str(caught.value).startswith(f"some.gguf: {message}")
