"""Fields of config.json, and keys of GGUF files, of a small decoder."""

from pathlib import Path

from trioengine.hub.checkpoint import GGUF_ARCHITECTURES, HF_ARCHITECTURES
from trioengine.hub.model_config import Fields

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


GGUF = {
    "context_length": 256,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
DELTA = {
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 6,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
SHAPES = {"token_embd.weight": (100, 32), **{f"blk.{index}.attn_norm.weight": (32,) for index in range(62)}}


def read_gguf(name, **keys):
    metadata = {f"{name}.{key}": value for key, value in {**GGUF, **keys}.items()}
    return GGUF_ARCHITECTURES[name].config(metadata, SHAPES, Path("some.gguf"))
