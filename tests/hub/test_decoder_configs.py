"""The configurations of decoders beside Llama: each field in each of its forms."""

import math
from dataclasses import replace

import pytest
from helpers.decoder_fields import ABSENT, BASE, DELTA, FULL, LINEAR, LONG, SHORT, SLIDING, WINDOWS, read, read_gguf

from trioengine.hub.experts_config import ExpertsShape
from trioengine.hub.model_config import StatePart
from trioengine.hub.qwen3_5_config import DeltaShape
from trioengine.hub.rope_config import RopeScaling, RopeType


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
    assert config.experts.layers == has_experts
    assert config.has_experts == any(has_experts)
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


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe_text"])
def test_the_names_of_the_number_of_experts(model_type):
    """In published files, and in files of transformers 5."""
    assert read(model_type, num_experts=19).experts.count == 19
    assert read(model_type, num_local_experts=19).experts.count == 19
    defaults = {"qwen3_moe": 128, "olmoe": 64, "qwen3_next": 512, "qwen3_5_moe_text": 256}
    assert read(model_type).experts.count == defaults[model_type]


def test_defaults_are_those_of_transformers():
    gemma, smollm, qwen = read("gemma3_text"), read("smollm3"), read("qwen3")
    assert (gemma.head_dim, gemma.query_pre_attn_scalar, gemma.rms_norm_eps) == (256, 256.0, 1e-6)
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.tie_word_embeddings) == (1e6, 1e4, True)
    assert (smollm.rope_theta, smollm.tie_word_embeddings) == (2e6, True)
    assert (qwen.head_dim, qwen.tie_word_embeddings, qwen.attention_bias) == (128, False, False)
    assert read("olmo2").rms_norm_eps == read("phi3").rms_norm_eps == read("olmoe").rms_norm_eps == 1e-5
    moe, olmoe = read("qwen3_moe", num_key_value_heads=...), read("olmoe", num_key_value_heads=...)
    assert (moe.num_kv_heads, moe.head_dim, moe.experts.num_chosen, moe.experts.normalizes) == (4, 8, 8, False)
    assert (olmoe.num_kv_heads, olmoe.experts.num_chosen, olmoe.experts.normalizes) == (4, 8, False)
    for model_type, num_chosen in (("qwen3_next", 10), ("qwen3_5_moe_text", 8)):
        hybrid = read(model_type, num_key_value_heads=..., intermediate_size=...)
        assert (hybrid.num_kv_heads, hybrid.head_dim, hybrid.rotary_dim) == (2, 256, 64)
        assert (hybrid.experts.size, hybrid.experts.shared_size) == (512, 512)
        assert (hybrid.experts.num_chosen, hybrid.experts.normalizes) == (num_chosen, True)
    seed, nulls = read("seed_oss", num_attention_heads=8, **ABSENT), read("seed_oss", **dict.fromkeys(ABSENT))
    assert (seed.num_kv_heads, seed.head_dim, nulls.num_kv_heads, nulls.head_dim) == (8, 128, 4, 8)
    assert (seed.attention_bias, seed.output_bias, seed.mlp_bias) == (True, False, False)
    assert (seed.tie_word_embeddings, seed.rope_theta) == (False, 1e4)
    ernie, nulls = read("ernie4_5", num_attention_heads=8, **ABSENT), read("ernie4_5", **dict.fromkeys(ABSENT))
    assert (ernie.num_kv_heads, ernie.head_dim, nulls.num_kv_heads, nulls.head_dim) == (2, 128, 4, 8)
    assert (ernie.tie_word_embeddings, ernie.rope_theta, ernie.rms_norm_eps) == (True, 5e5, 1e-5)
    assert read("ernie4_5", rope_parameters={"rope_type": "default"}).rope_theta == 5e5
    assert not any(name.endswith(".bias") for name in read("ernie4_5", attention_bias=True).wanted_tensors())
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
    assert qwen.model_type == "qwen3_moe"
    shape = {"count": 6, "num_chosen": 2, "layers": (True,) * 4}
    assert qwen.experts == ExpertsShape(size=16, normalizes=True, **shape)
    olmoe = read_gguf("olmoe", **counts)
    assert olmoe.experts == ExpertsShape(size=48, normalizes=False, **shape)
    sizes = {"expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 20}
    for name in ("qwen35moe", "qwen3next"):
        assert read_gguf(name, **DELTA, **counts, **sizes).experts == ExpertsShape(
            size=16, normalizes=True, shared_size=20, **shape
        )


LAYERS = ("model.layers.", "blk.")


@pytest.mark.parametrize(
    ("keys", "attends"),
    [
        ({}, (False, False, False, True)),
        ({"full_attention_interval": 2}, (False, True, False, True)),
        ({"full_attention_interval": 3, "nextn_predict_layers": 1}, (False, False, True)),
    ],
)
def test_the_layers_of_qwen3_5_in_gguf_files(keys, attends):
    """Without the last ones, which predict more tokens, and whose tensors are ignored."""
    config = read_gguf("qwen35", **DELTA, **keys)
    assert (config.attends, config.num_layers, config.windows) == (attends, len(attends), (None,) * len(attends))
    assert config.delta == DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=8, num_taps=4)
    ignored = {"mtp.", "model.visual.", *(f"{layer}{i}." for i in range(len(attends), 4) for layer in LAYERS)}
    assert set(config.ignored_prefixes) == ignored
