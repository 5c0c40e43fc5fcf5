"""Tiny checkpoints with random weights, of Llama and of Qwen2: the same numbers wherever they are written."""

from pathlib import Path
from typing import Any

import torch

from helpers.random_checkpoint import RandomTensors, write_checkpoint

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3, "num_key_value_heads": 1},
    "bias": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "qwen2": QWEN2,
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True, "num_key_value_heads": 3, "rope_theta": 1e6},
}
PROMPT = [(7 * i * i + 3 * i + 5) % 200 for i in range(90)]


def tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its Hugging Face name, in float32."""
    weights = RandomTensors(seed)
    add_llama(weights, config)
    return weights.by_name


def add_llama(weights: RandomTensors, config: dict, prefix: str = "model.") -> None:
    """The tensors of a Llama, whose names begin with the prefix but for the output projection's."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    weights.add(prefix + "embed_tokens.weight", config["vocab_size"], hidden, scale=1.0)
    weights.add(prefix + "norm.weight", hidden, mean=1.0)
    if not config.get("tie_word_embeddings"):
        weights.add("lm_head.weight", config["vocab_size"], hidden, scale=1.0)
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{layer}."
        weights.add(name + "input_layernorm.weight", hidden, mean=1.0)
        weights.add(name + "post_attention_layernorm.weight", hidden, mean=1.0)
        for projection, rows, columns in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            weights.add(f"{name}self_attn.{projection}_proj.weight", rows, columns)
            if config.get("attention_bias") or (config["model_type"] == "qwen2" and projection != "o"):
                weights.add(f"{name}self_attn.{projection}_proj.bias", rows)
        for projection, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            weights.add(f"{name}mlp.{projection}_proj.weight", rows, columns)
            if config.get("mlp_bias"):
                weights.add(f"{name}mlp.{projection}_proj.bias", rows)


def write(path: Path, variant: str, *, seed: int = 0, **changes: object) -> Path:
    """A Hugging Face directory of the variant; each seed has other weights."""
    config = BASE | VARIANTS[variant] | changes
    return write_checkpoint(path, {"config.json": config}, tensors(config, seed))
