"""Convolutions and gated delta nets in plain torch, with the states that they leave: the reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from trioengine.worker.kernels import Convolution, GatedDelta
from trioengine.worker.kernels.batch import StateRows

_EPSILON = 1e-6  # of the squared lengths of queries and keys


class Past:
    """The rows of a step, each sequence's behind those in its state, so that taps are rows at fixed distances."""

    def __init__(self, x: Tensor, kept: Tensor, rows: StateRows) -> None:
        """x [num_tokens, size]; kept [num_slots, num_kept, size]: the last rows before the step's."""
        self._rows, self._num_kept = rows, kept.shape[1]
        self._before = torch.arange(self._num_kept, device=x.device)
        # rows of states before each sequence
        self._moved = self._num_kept * torch.arange(1, len(rows.slots) + 1, device=x.device)
        self._places = torch.arange(len(x), device=x.device) + self._moved[rows.sequences]
        self._known = x.new_empty((len(x) + self._num_kept * len(rows.slots), x.shape[1]))
        self._known[self._behind(rows.first_rows[:-1] + self._moved)] = kept[rows.slots]
        self._known[self._places] = x

    def convolved(self, weight: Tensor) -> Tensor:
        """The sums over the taps [num_taps, size]: [num_tokens, size], float32."""
        result = torch.zeros((len(self._places), weight.shape[1]), device=weight.device)
        for age, tap in enumerate(weight.flip(0)):
            result += self._known[self._places - age].float() * tap
        return result

    def store(self, kept: Tensor) -> None:
        """Store the last rows of all sequences in their slots, and those that are saved."""
        rows = self._rows
        saved, num_tokens, slots = rows.saves.unbind(1)
        kept[slots] = self._known[self._behind(rows.first_rows[saved] + self._moved[saved] + num_tokens)]
        kept[rows.slots] = self._known[self._behind(rows.first_rows[1:] + self._moved)]

    def _behind(self, ends: Tensor) -> Tensor:
        """The places of the last rows before the ends."""
        return (ends - self._num_kept)[:, None] + self._before


def convolve(inputs: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
    """As the kernel."""
    b, c, x = inputs.chunk(3, dim=1)
    known = Past(b * x, states, rows)
    result = known.convolved(convolution.weight)
    if convolution.bias is not None:
        result += convolution.bias
    known.store(states)
    return (result * c.float()).to(x.dtype)


def update_delta(inputs: Tensor, delta: GatedDelta, kept: Tensor, matrices: Tensor, rows: StateRows) -> Tensor:
    """As Kernels.update_delta: the recurrence, for all sequences at once, and one token of each after the other."""
    heads, key_dim, value_dim = matrices.shape[1:]
    keys, values = delta.num_key_heads * key_dim, heads * value_dim
    past, z, b, a = torch.split(inputs, [2 * keys + values, values, heads, heads], dim=1)
    known = Past(past, kept, rows)
    q, k, v = torch.split(silu(known.convolved(delta.taps)), [keys, keys, values], dim=1)
    known.store(kept)
    q, k = (_unit(x.view(-1, delta.num_key_heads, key_dim), heads // delta.num_key_heads) for x in (q, k))
    q, v = q * key_dim**-0.5, v.view(-1, heads, value_dim)
    shares = torch.exp(-delta.rates * softplus(a.float() + delta.time_bias))
    results = _scan(q, k, v, shares, b.float().sigmoid(), matrices, rows)
    scales = torch.rsqrt(results.square().mean(-1, keepdim=True) + delta.norm.epsilon)
    normed = (results * scales * delta.norm.weight).flatten(1)
    return (normed * silu(z.float())).to(inputs.dtype)


def _unit(x: Tensor, count: int) -> Tensor:
    """Heads [num_tokens, num_heads, size] of the length 1, each of them `count` times."""
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)).repeat_interleave(count, dim=1)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, shares: Tensor, weights: Tensor, matrices: Tensor, rows: StateRows
) -> Tensor:
    """The matrices' results [num_tokens, heads, value_dim] for the queries; the matrices are updated."""
    results, first_rows = torch.empty_like(v), rows.first_rows
    lengths = first_rows.diff()
    current = matrices[rows.slots]
    saved, num_tokens, slots = rows.saves.unbind(1)
    for age in range(int(lengths.max())):
        live = (lengths > age).nonzero().flatten()
        at = first_rows[live] + age
        matrix = current[live] * shares[at][:, :, None, None]
        change = (v[at] - (matrix * k[at][..., None]).sum(2)) * weights[at][..., None]
        matrix += k[at][..., None] * change[:, :, None]
        results[at] = (matrix * q[at][..., None]).sum(2)
        current[live] = matrix
        here = num_tokens == age + 1
        matrices[slots[here]] = current[saved[here]]
    matrices[rows.slots] = current
    return results
