"""The kernels of a step: attention, norms, rotation, activation, and all of a decoder; one class a backend.

This module is their interface, with the parameters that models pass to them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels.batch import ForwardBatch, StateRows
from trioengine.worker.kernels.best_tokens import Best
from trioengine.worker.kernels.kv_cache import KVCache, KVOrder
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.state_cache import StateCache


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x * weight / sqrt(mean(x ** 2) + epsilon)` (arXiv 1910.07467)."""

    weight: Tensor  # [size], float32
    epsilon: float


@dataclass(frozen=True, slots=True)
class Residual:
    """How a block's result is added to the residual stream: `hidden += scale * delta_norm(delta)`.

    The next block gets `norm(hidden)`. No norm: the numbers themselves.
    """

    norm: RMSNorm | None
    delta_norm: RMSNorm | None = None
    scale: float = 1.0


class RotaryTable:
    """Cosines and sines of all positions, for the first `size` elements of a head (arXiv 2104.09864)."""

    def __init__(
        self,
        frequencies: Tensor,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ) -> None:
        """`frequencies` [size / 2], in radians a position; `scale` multiplies cosines and sines."""
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.size = 2 * len(frequencies)
        self.table = torch.empty((max_positions, 2 * self.size), dtype=dtype, device=device)
        first_cos, second_cos, minus_sin, sin = self.table.chunk(4, dim=1)  # the sine carries the rotation's sign
        first_cos.copy_(angles.cos().mul_(scale))
        second_cos.copy_(first_cos)
        sin.copy_(angles.sin_().mul_(scale))
        torch.neg(sin, out=minus_sin)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A gated convolution over the tokens of a sequence, in each column by itself (LFM2, arXiv 2511.23404).

    Of inputs `b, c, x` it is `c * sum(weight[k] * (b * x)[token - num_taps + 1 + k])`. A sequence's state are the
    products `b * x` of its last `num_taps - 1` tokens.
    """

    weight: Tensor  # [num_taps, size], float32; the last tap is the token's own
    bias: Tensor | None = None  # [size], float32: added to the sum


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net over the tokens of a sequence (arXiv 2412.06464, as in Qwen3-Next).

    Its inputs are `q, k, v, z, b, a`. Queries, keys and values go through a convolution in each column, and SiLU. Then
    heads of queries and keys are divided by their lengths, and queries by the root of `key_dim`. A head of values has a
    matrix S, and shares a head of queries and keys with those beside it. A token's result is

        S *= exp(-rate * softplus(a + time_bias))
        S += outer(k, sigmoid(b) * (v - k @ S))
        result = norm(q @ S) * silu(z)

    A sequence's state are the last `num_taps - 1` inputs of the convolution, and the matrices.
    """

    taps: Tensor  # [num_taps, 2 * num_key_heads * key_dim + num_value_heads * value_dim], float32
    rates: Tensor  # [num_value_heads], float32, above 0
    time_bias: Tensor  # [num_value_heads], float32
    norm: RMSNorm  # of each head of results: [value_dim]
    num_key_heads: int
    key_dim: int

    @property
    def num_value_heads(self) -> int:
        return len(self.rates)

    @property
    def value_dim(self) -> int:
        return len(self.norm.weight)


class Activation(enum.Enum):
    """The function of the gates in an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))` (arXiv 2002.05202)."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Routing:
    """How the scores of experts become choices and weights."""

    num_chosen: int  # of a token, without a shared expert
    normalizes: bool  # whether the weights of the chosen ones add up to 1
    has_shared: bool = False  # whether the last one is every token's, with the sigmoid of its score as weight

    @property
    def num_used(self) -> int:
        """The experts of a token."""
        return self.num_chosen + self.has_shared


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which a router chooses some for each token; their results are added, by weights (Kernels.route)."""

    router: Linear  # one score for each MLP
    mlps: Sequence[GatedMLP]  # all of one size, but for the shared one
    routing: Routing


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer: attention, a convolution or a delta net, and an MLP or experts.

    Projections that share their input are one.
    """

    qkv: Linear  # queries, keys and values; the inputs of a convolution or a delta net
    output: Linear
    mlp: GatedMLP | Experts
    attention_norm: RMSNorm | None  # of the hidden states that attention gets
    mlp_norm: RMSNorm | None
    attention_output_norm: RMSNorm | None = None  # of the result, before it is added
    mlp_output_norm: RMSNorm | None = None
    query_norm: RMSNorm | None = None  # of each head, or of all together: as large as its weight
    key_norm: RMSNorm | None = None
    rotary: RotaryTable | None = None  # None: no rotation
    window: int | None = None  # tokens that a query sees, itself among them; None: all before it
    has_gates: bool = False  # of attention's results: `qkv` gives each head of queries, and its gates behind it
    convolution: Convolution | None = None  # in place of attention
    delta: GatedDelta | None = None  # in place of attention


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The embedding, all layers, the norm behind them, and the head; and the numbers that layers share."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    head: Linear | None  # to logits in float32; None: an embedding model has none
    attention_scale: float  # of the products of queries and keys
    embedding_scale: float = 1.0  # of the embeddings, before they are rounded to the dtype
    residual_scale: float = 1.0  # of all results of attention and MLPs
    logits_scaling: float = 1.0  # divides the logits
    activation: Activation = Activation.SILU

    def residuals(self) -> Iterator[tuple[Residual, Residual]]:
        """For each layer: behind its attention, and behind its MLP, where the next layer's norm follows."""
        following = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for layer, norm in zip(self.layers, following, strict=True):
            yield (
                Residual(layer.mlp_norm, layer.attention_output_norm, self.residual_scale),
                Residual(norm, layer.mlp_output_norm, self.residual_scale),
            )


class Computed(NamedTuple):
    """The results of a step, until the next one."""

    logits: Tensor  # [num_outputs, vocab_size], float32
    best: Best

    def first(self, rows: int) -> Computed:
        """The results of the first output rows."""
        return Computed(self.logits[:rows], Best(self.best.logits[:rows], self.best.token_ids[:rows]))


class Decoder(Protocol):
    """All of a model that computes tokens."""

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        """Compute the layers, and store their keys, values and states.

        `states`: of the layers that have them, in their order. Returns the normalized hidden states
        [num_outputs, hidden_size] of the batch's output rows, dtype.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size], in float32, of rows that `forward` has returned."""
        ...

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        """Compute the logits of the output rows, and their best tokens, with the bits of the separate calls.

        Raises InvariantError for an embedding model.
        """
        ...


class Attention(Protocol):
    """One step's attention: a backend lays out the batch once, and then runs every layer."""

    def forward(self, layer: int, heads: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Store the new keys and values, and attend to the context, or to the last `window` tokens of it.

        heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; `scale` multiplies the
        products of queries and keys; returns [num_tokens, num_heads * head_dim].
        """
        ...


class Kernels(Protocol):
    """One backend's kernels, for one model; all tensors are contiguous, and on the model's device.

    The weights have one `dtype`, and the KV cache the same or int8. The residual stream is in float32.
    """

    @property
    def name(self) -> str:
        """The name in READY."""
        ...

    @property
    def cache_order(self) -> KVOrder:
        """The order of the elements in the KV cache that it takes."""
        ...

    @property
    def has_window_tables(self) -> bool:
        """Whether its attention reads layers with windows by tables of their own (`ForwardBatch.windowed`)."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether each token's results have the same bits whatever other tokens the step has."""
        ...

    def add(self, hidden: Tensor, delta: Tensor, residual: Residual) -> Tensor:
        """Add delta to hidden in place, and return the sum's norm, in dtype; the delta is consumed.

        hidden [num_tokens, size], float32; delta [num_tokens, size], dtype; returns [num_tokens, size].
        """
        ...

    def norm_heads_(self, heads: Tensor, start: int, stop: int, norm: RMSNorm) -> None:
        """Normalize heads from `start` to `stop` of [num_tokens, num_heads, head_dim] in place.

        Each head by itself, or all of a token together: as many elements as the norm's weight has.
        """
        ...

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        """Rotate the first `count` heads of [num_tokens, num_heads, head_dim] in place; positions [num_tokens].

        Elements behind the table's size stay.
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` (arXiv 2002.05202): [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
        ...

    def convolve(self, inputs: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
        """Compute the convolution, and store the states behind the sequences' tokens.

        inputs [num_tokens, 3 * size]; states [num_slots, num_taps - 1, size]; returns [num_tokens, size].
        """
        ...

    def route(self, scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The experts with the largest scores, the first of equal ones first, and the softmax of their scores at them.

        Behind them the shared expert, whose score counts for nothing else. scores [num_rows, num_experts], dtype;
        returns [num_rows, num_used], int64, and the same, float32. A score that is nan makes weights of its row nan:
        the shared expert's its own, another all others.
        """
        ...

    def mix(self, results: Tensor, weights: Tensor) -> Tensor:
        """Add up each row's results by their weights, in their order, in float32.

        results [num_rows, num_used, size], dtype; weights [num_rows, num_used], float32; returns [num_rows, size].
        """
        ...

    def update_delta(
        self, inputs: Tensor, delta: GatedDelta, kept: Tensor, matrices: Tensor, rows: StateRows
    ) -> Tensor:
        """Compute the delta net, and store the states behind the sequences' tokens.

        inputs [num_tokens, size]; states: kept [num_slots, num_taps - 1, columns of taps], and float32 matrices
        [num_slots, num_value_heads, key_dim, value_dim]; returns [num_tokens, num_value_heads * value_dim].
        """
        ...

    def gate_(self, results: Tensor, gates: Tensor) -> None:
        """Multiply results [num_tokens, size] by the sigmoids of gates [num_tokens, size], in place."""
        ...

    def best(self, logits: Tensor) -> Best:
        """Find the best token of every row of logits [num_rows, vocab_size], float32."""
        ...

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        """Lay out a step's attention, for all layers."""
        ...

    def decoder(self, config: TextConfig, weights: DecoderWeights) -> Decoder:
        """Make the decoder of these weights, which are of the config's shape."""
        ...


class RecordableAttention(Attention, Protocol):
    """Attention whose kernels read the layout of a step from memory that stays the same."""

    def lay_out(self, batch: ForwardBatch) -> None:
        """From now on attend as this step does, which has as many sequences, with one new token each."""
        ...


@runtime_checkable
class RecordableKernels(Kernels, Protocol):
    """Kernels whose steps can be recorded as CUDA graphs."""

    def plan_size(self, num_seqs: int, max_blocks: int) -> int:
        """The numbers of the layout of that many sequences, with one new token and so many blocks each, at most."""
        ...

    def recordable_attention(self, batch: ForwardBatch, cache: KVCache, memory: Tensor) -> RecordableAttention:
        """Lay out a step of one token a sequence in that memory: int32, on the GPU."""
        ...
