"""Idefics3 and SmolVLM: a SigLIP tower, a pixel shuffle, a projection, and a Llama decoder (arXiv 2408.12637).

A tile of an image is seen alone, and on the CPU computed alone: its embeddings have the same bits whatever tiles are
encoded beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.core.image import ImageProcessing
from trioengine.hub.idefics3_config import (
    CONNECTOR,
    PATCHES,
    POSITIONS,
    TEXT_PREFIX,
    VISION_PREFIX,
    Idefics3Config,
    VisionConfig,
)
from trioengine.worker.kernels import Attention, Computed, Kernels
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LlamaModel
from trioengine.worker.weights.checkpoint import WeightReader

_CPU_TILES, _GPU_TILES = 1, 16  # that are computed together


class Idefics3Model:
    """The vision tower with its connector, and the decoder, which is Llama's."""

    def __init__(self, config: Idefics3Config, weights: WeightReader, kernels: Kernels, max_model_len: int) -> None:
        """Read the weights, one layer at a time."""
        self._text = LlamaModel(config.text, weights, kernels, max_model_len, TEXT_PREFIX)
        self.dtype, self.device = self._text.dtype, self._text.device
        self._pixels = PixelValues(config.images, self.device)
        self._tower = VisionTower(config.vision, weights, self.device)
        self._scale = config.scale_factor
        self._connector = weights.linear(CONNECTOR)

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        """As LlamaModel's."""
        return self._text.forward(batch, attention, states)

    def logits(self, hidden: Tensor) -> Tensor:
        """As LlamaModel's."""
        return self._text.logits(hidden)

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        """As LlamaModel's."""
        return self._text.compute(batch, attention, states)

    def encode(self, tiles: Tensor) -> Tensor:
        """The embeddings [num_tiles, tokens_per_tile, hidden_size] of uint8 tiles [num_tiles, 3, size, size]."""
        at_once = _CPU_TILES if self.device.type == "cpu" else _GPU_TILES
        return torch.cat([self._encode(part) for part in torch.split(tiles, at_once)])

    def _encode(self, tiles: Tensor) -> Tensor:
        pixels = self._pixels.normalized(tiles.to(self.device)).to(self.dtype)
        shuffled = pixel_shuffle(self._tower.forward(pixels), self._scale)
        return self._connector(shuffled.flatten(0, 1)).view(*shuffled.shape[:2], -1)


class PixelValues:
    """Rescales bytes, and normalizes them by channel."""

    def __init__(self, images: ImageProcessing, device: torch.device) -> None:
        self._factor = images.rescale_factor
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
            for values in (images.mean, images.std)
        )

    def normalized(self, tiles: Tensor) -> Tensor:
        """[num_tiles, 3, size, size], uint8 -> float32."""
        return (tiles.float() * self._factor).sub_(self._mean).div_(self._std)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias` (arXiv 1607.06450)."""

    weight: Tensor  # [size], float32
    bias: Tensor
    epsilon: float

    def apply(self, x: Tensor) -> Tensor:
        """Over the last dimension, in float32."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """The weights of one encoder layer; projections that share their input are one."""

    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


class VisionTower:
    """SigLIP's encoder (arXiv 2303.15343). The residual stream is kept in float32, whatever the weights' dtype."""

    def __init__(self, config: VisionConfig, weights: WeightReader, device: torch.device) -> None:
        """Read the weights, one layer at a time."""
        self._config = config
        self._patches = weights.tensor(f"{VISION_PREFIX}{PATCHES}.weight")  # [hidden_size, 3, patch_size, patch_size]
        self._patch_bias = weights.tensor(f"{VISION_PREFIX}{PATCHES}.bias")
        self._positions = weights.tensor(f"{VISION_PREFIX}{POSITIONS}.weight")  # [num_patches, hidden_size]
        self._position_ids = position_ids(config.patches_per_edge).to(device)
        self._layers = [
            _read_layer(config, f"{VISION_PREFIX}encoder.layers.{index}.", weights)
            for index in range(config.num_layers)
        ]
        self._norm = _read_norm(config, VISION_PREFIX + "post_layernorm", weights)

    def forward(self, pixels: Tensor) -> Tensor:
        """[num_tiles, 3, size, size] -> [num_tiles, num_patches, hidden_size]."""
        dtype = pixels.dtype
        patches = F.conv2d(pixels, self._patches, self._patch_bias, stride=self._config.patch_size)
        hidden = patches.flatten(2).transpose(1, 2).float() + F.embedding(self._position_ids, self._positions)
        for layer in self._layers:
            hidden += self._attend(layer, layer.attention_norm.apply(hidden).to(dtype))
            hidden += _mlp(layer, layer.mlp_norm.apply(hidden).to(dtype))
        return self._norm.apply(hidden).to(dtype)

    def _attend(self, layer: VisionLayer, hidden: Tensor) -> Tensor:
        tiles, patches, size = hidden.shape
        qkv = layer.qkv(hidden.flatten(0, 1)).view(tiles, patches, 3, self._config.num_heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each [num_tiles, num_heads, num_patches, head_dim]
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return layer.output(attended.transpose(1, 2).reshape(-1, size)).view(tiles, patches, size)


def _mlp(layer: VisionLayer, hidden: Tensor) -> Tensor:
    inner = F.gelu(layer.up(hidden.flatten(0, 1)), approximate="tanh")
    return layer.down(inner).view(hidden.shape)


def position_ids(patches_per_edge: int) -> Tensor:
    """The place of each patch in the table of positions: [num_patches].

    Fractions of an edge are put into buckets, as transformers does, where rounding moves some patches by one place, if
    an edge has 19, 25, 29 or 31 patches, say.
    """
    edge = patches_per_edge
    boundaries = torch.arange(1 / edge, 1.0, 1 / edge)
    fractions = torch.arange(edge, dtype=torch.float32) * (1.0 / torch.tensor(edge))
    buckets = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (buckets[:, None] * edge + buckets[None, :]).flatten()


def pixel_shuffle(patches: Tensor, scale: int) -> Tensor:
    """Join squares of scale x scale patches: [n, edge ** 2, size] -> [n, (edge / scale) ** 2, size * scale ** 2]."""
    tiles, count, size = patches.shape
    edge = int(count**0.5) // scale
    squares = patches.view(tiles, edge, scale, edge, scale * size).transpose(2, 3)
    return squares.reshape(tiles, edge * edge, scale * scale * size)


def _read_norm(config: VisionConfig, name: str, weights: WeightReader) -> LayerNorm:
    weight, bias = (weights.tensor(f"{name}.{kind}").float() for kind in ("weight", "bias"))
    return LayerNorm(weight, bias, config.layer_norm_eps)


def _read_layer(config: VisionConfig, prefix: str, weights: WeightReader) -> VisionLayer:
    def linear(*names: str) -> Linear:
        return weights.linear(*(prefix + name for name in names))

    return VisionLayer(
        attention_norm=_read_norm(config, prefix + "layer_norm1", weights),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=linear("self_attn.out_proj"),
        mlp_norm=_read_norm(config, prefix + "layer_norm2", weights),
        up=linear("mlp.fc1"),
        down=linear("mlp.fc2"),
    )


Model: ModelFactory = Idefics3Model
