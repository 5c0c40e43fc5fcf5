"""The configurations of decoders beside Llama: each bad value is refused, with the name of its field or key."""

import pytest
from helpers.decoder_fields import BASE, COUNT, DELTA, FULL, LAYER_TYPES, LONG, SHORT, SLIDING, WINDOWS, read, read_gguf

from trioengine.core.errors import ModelError


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
                *("qwen3_moe", "olmoe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "seed_oss", "ernie4_5"),
            )
        ),
        ("mistral", {"sliding_window": "4096"}, f"sliding_window {COUNT}, got '4096'"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must be at least 4 of 0 and 1, got [1, 2, 1, 1]"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be at least 4 of 0 and 1, got [1]"),
        ("smollm3", {"no_rope_layer_interval": 0}, f"no_rope_layer_interval {COUNT}, got 0"),
        ("seed_oss", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias must be true or false, got 'no'"),
        ("seed_oss", {"num_key_value_heads": ...}, "num_key_value_heads must divide the number of heads, 4, got 8"),
        ("ernie4_5", {"use_bias": True}, "use_bias is not supported"),
        ("ernie4_5", {"use_bias": 1}, "use_bias must be true or false, got 1"),
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
        ("qwen3_moe", {"num_experts": 1 << 14}, "num_experts must be at most 8333 in 4 layers, got 16384"),
        ("qwen3_moe", {"num_local_experts": 2**31 - 1}, "num_local_experts must be at most 8333 in 4 layers"),
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
        ("qwen3_5_moe", {"text_config": 3}, "text_config must be an object, got 3"),
        *(
            (kind, fields, message)
            for kind in ("qwen3_next", "qwen3_5_moe_text")
            for fields, message in (
                ({"shared_expert_intermediate_size": 0}, f"shared_expert_intermediate_size {COUNT}, got 0"),
                ({"moe_intermediate_size": "9"}, f"moe_intermediate_size {COUNT}, got '9'"),
                ({"num_experts": 7, "num_experts_per_tok": 8}, "num_experts_per_tok must be at most the number of"),
                ({"num_experts": 1 << 14}, "num_experts must be at most 8333 in 4 layers, got 16384"),
                ({"attn_output_gate": False}, "attn_output_gate must be true, got False"),
                ({"linear_num_key_heads": 3}, "linear_num_value_heads must be a multiple of the heads of keys, 3"),
                ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
            )
        ),
        ("qwen3_next", {"decoder_sparse_step": 0}, f"decoder_sparse_step {COUNT}, got 0"),
        ("qwen3_next", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers, got [True]"),
        ("qwen3_next", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
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
            {"expert_count": 8334, "expert_used_count": 7},
            "olmoe.expert_count must be at most 8333 in 4 layers, got 8334",
        ),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv is not supported"),
        ("qwen35", {**DELTA, "ssm.time_step_rank": 5}, "qwen35.ssm.time_step_rank must be a multiple of the heads of"),
        ("qwen35", {**DELTA, "ssm.inner_size": 33}, "qwen35.ssm.inner_size must be a multiple of the heads of values"),
        ("qwen35", {**DELTA, "ssm.inner_size": 1028}, "qwen35.ssm.inner_size must be at most 1024, got 1028"),
        ("qwen35", {**DELTA, "ssm.state_size": 300}, "qwen35.ssm.state_size must be at most 256, got 300"),
        ("qwen35", {**DELTA, "ssm.conv_kernel": 1}, "qwen35.ssm.conv_kernel must be from 2 to 64, got 1"),
        ("qwen35", {**DELTA, "nextn_predict_layers": 1}, "a model without a layer of attention is not supported"),
        ("qwen35", {**DELTA, "nextn_predict_layers": 2}, "qwen35.nextn_predict_layers must be at most 1, got 2"),
        ("qwen35", {"rope.dimension_count": 4}, f"qwen35.ssm.group_count {COUNT}, got None"),
        ("qwen35moe", DELTA, f"qwen35moe.expert_feed_forward_length {COUNT}, got None"),
        (
            "qwen3next",
            {**DELTA, "expert_feed_forward_length": 8},
            f"qwen3next.expert_shared_feed_forward_length {COUNT}, got None",
        ),
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
            for kind in (
                "gemma3",
                "smollm3",
                "phi3",
                "qwen3",
                "qwen3moe",
                "olmoe",
                "lfm2",
                "seed_oss",
                "ernie4_5",
                "qwen35",
                "qwen35moe",
            )
        ),
        ("smollm3", {"block_count": "4"}, f"smollm3.block_count {COUNT}, got '4'"),
        ("qwen3", {"rope.dimension_count": 4}, "qwen3.rope.dimension_count must be the size of a head, 8, got 4"),
    ],
)
def test_a_bad_key_is_named(name, keys, message):
    with pytest.raises(ModelError) as caught:
        read_gguf(name, **keys)
    assert str(caught.value).startswith(f"some.gguf: {message}")
