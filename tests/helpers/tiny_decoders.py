"""Tiny checkpoints with random weights of the architectures beside Llama: the same numbers wherever they lie."""

from pathlib import Path
from typing import Any

import torch

from helpers.random_checkpoint import RandomTensors, write_checkpoint
from helpers.tiny_llama import BASE
from trioengine.hub.checkpoint import HF_ARCHITECTURES
from trioengine.hub.model_config import Fields, ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT = [1.0, 1.1, 1.3]
LONG = [1.5, 4.0, 9.0]
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 12}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
SMOLLM3 = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5, "pad_token_id": 0}
GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
OLMO2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "num_hidden_layers": 7,
    "sliding_window": 20,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
LFM2 = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 6,
    "full_attn_idxs": [2, 4],
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
OLMOE = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 64,  # whole groups of columns, also of an expert: its weights may be of integers
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 5,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
SHARED = {  # beside six experts, of which a token is given to two
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_NEXT = {
    **QWEN35,
    **SHARED,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
QWEN35_MOE = {
    **QWEN35,
    **SHARED,
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
}
SEED_OSS = {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"]}
ERNIE45 = {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}
MAX_MODEL_LEN = {"phi3-short": 180}  # of a text whose frequencies are those of short ones
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2-window": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **WINDOWS},
    "qwen2-yarn": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 4, "rope_theta": 1e6},
    "qwen3-window": {**QWEN3, **WINDOWS, "attention_bias": True},
    "mistral": {**MISTRAL, "head_dim": 10},
    "mistral-window": {**MISTRAL, "sliding_window": 33, "num_key_value_heads": 3},
    "smollm3": SMOLLM3,
    "smollm3-every": {**SMOLLM3, "no_rope_layers": [0, 1, 0, 1, 1], "tie_word_embeddings": True, "rope_theta": 5e6},
    "granite": GRANITE,
    "granite-biases": {**GRANITE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3},
    "olmo2": OLMO2,
    "olmo2-groups": {**OLMO2, "num_key_value_heads": 6, "rope_theta": 5e5, "head_dim": 8},
    "phi3": {**PHI3, "sliding_window": 40},
    "phi3-partial": {**PHI3, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "phi3-short": {
        **PHI3,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 180,
    },
    "phi3-long": {
        **PHI3,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 64,
    },
    "lfm2": LFM2,
    "lfm2-biases": {
        **LFM2,
        "conv_L_cache": 5,
        "conv_bias": True,
        "num_key_value_heads": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
        "full_attn_idxs": [0, 1, 5],
    },
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-dense": {  # between layers with experts, whose number is no power of two
        **QWEN3_MOE,
        "num_hidden_layers": 5,
        "num_experts": 11,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "attention_bias": True,
    },
    "qwen3-moe-first": {  # the first layers have no experts, and a token is given to one of them
        **QWEN3_MOE,
        "mlp_only_layers": [0],
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "num_key_value_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 30,
    },
    "olmoe": OLMOE,
    "olmoe-groups": {
        **OLMOE,
        "num_key_value_heads": 4,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "seed_oss": {**SEED_OSS, "head_dim": 8, "num_key_value_heads": 3, "attention_out_bias": True, "mlp_bias": True},
    "seed_oss-tied": {
        **SEED_OSS,
        "head_dim": 20,
        "num_attention_heads": 4,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": 1e7,
    },
    "ernie4_5": {**ERNIE45, "head_dim": 14, "num_key_value_heads": 3},
    "ernie4_5-tied": {
        **ERNIE45,
        "head_dim": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gemma3": GEMMA3,
    "gemma3-scaled": {
        **GEMMA3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3_5": QWEN35,
    "qwen3_5-even": {
        **QWEN35,
        "full_attention_interval": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 36,
        "linear_conv_kernel_dim": 2,
    },
    "qwen3_5-vision": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            **BASE,
            **QWEN35,
            "num_key_value_heads": 6,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 33,
            "linear_conv_kernel_dim": 5,
            "layer_types": [*["linear_attention"] * 2, *["full_attention"] * 2, "linear_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
    },
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next-some": {  # layers without experts; the shared one is smaller than the others
        **QWEN3_NEXT,
        "full_attention_interval": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": False,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 15,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 2,
    },
    "qwen3-next-groups": {
        **QWEN3_NEXT,
        "num_key_value_heads": 6,
        "num_experts_per_tok": 1,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 33,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "qwen3_5-moe": {
        **QWEN35_MOE,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 72,
        "num_key_value_heads": 6,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
    },
    "qwen3_5-moe-vision": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            **BASE,
            **QWEN35_MOE,
            "num_key_value_heads": 3,
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 9,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 8,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        },
        "tie_word_embeddings": True,
    },
}
UNIT_NORMS = (  # types whose weights of norms are 1 more than the tensors
    *("gemma3_text", "qwen3_5", "qwen3_5_text"),
    *("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
)


def config(variant: str, **changes: object) -> dict[str, Any]:
    """The content of config.json."""
    return BASE | VARIANTS[variant] | changes


def tensors(variant: str, seed: int = 0, **changes: object) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its Hugging Face name, in float32."""
    fields = config(variant, **changes)
    wanted = _read(fields).wanted_tensors()
    weights = RandomTensors(seed)
    for name, shape in wanted.items():
        is_norm = name.endswith("norm.weight")
        adds_one = fields["model_type"] in UNIT_NORMS and "linear_attn" not in name
        mean = 1.0 if is_norm and not adds_one else 0.0
        is_vocabulary = name.endswith("embed_tokens.weight") or name == "lm_head.weight"
        scale = (0.1 if "lm_head.weight" not in wanted else 1.0) if is_vocabulary else 0.15
        if name.endswith(("A_log", "dt_bias")):
            scale = 1.0
        weights.add(name, *shape, mean=mean, scale=scale)
    return weights.by_name


def _read(fields: dict[str, Any]) -> ModelConfig:
    return HF_ARCHITECTURES[fields["model_type"]](Fields(Path("config.json"), fields), 1000)


def joined(fields: dict[str, Any], separate: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a directory has them: several in the place of one, where the architecture joins them."""
    stored = dict(separate)
    for name, shape, parts in _read(fields).joined_tensors():
        if not parts.keys() <= stored.keys():  # of another layer
            continue
        rows = torch.cat([torch.tensor([row for piece in pieces for row in piece]) for pieces in parts.values()])
        stored[name] = torch.cat([stored.pop(part) for part in parts])[rows.argsort()].reshape(shape)
    return stored


def write(path: Path, variant: str, seed: int = 0, **changes: object) -> Path:
    """A Hugging Face directory of the variant."""
    fields = config(variant, **changes)
    return write_checkpoint(path, {"config.json": fields}, joined(fields, tensors(variant, seed, **changes)))
