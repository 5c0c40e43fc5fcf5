"""The layout of a Llama's tensors in a GGUF file: rotary pairs lie side by side."""

from __future__ import annotations

import torch

from trioengine.hub.llama_config import LlamaConfig


def from_gguf_layout(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Undo llama.cpp's permutation of the query and key rows: pairs (2i, 2i+1) become (i, i + head_dim / 2)."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    paired = tensor.view(heads, config.head_dim // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)
