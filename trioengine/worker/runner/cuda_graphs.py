"""Steps of one token a sequence as CUDA graphs: the CPU starts a graph, not hundreds of kernels.

A graph is a step that was recorded once. Its kernels read and write the same memory each time, so there is one for each
of a few numbers of sequences, and steps are padded to them (`Padding`). The weights and the KV cache are where they
were: with new ones, new graphs are recorded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trioengine.hub.experts_config import ExpertsConfig
from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Kernels, RecordableAttention, RecordableKernels
from trioengine.worker.kernels.batch import ForwardBatch, Padding, make_batch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.models import Model
from trioengine.worker.runner.sampling import best_tokens
from trioengine.worker.scheduling.sequence import SchedulerOutput


def recordable_kernels(kernels: Kernels, model: TextConfig) -> RecordableKernels | None:
    """The kernels, unless they or the model's layers wait for the GPU: those of experts and of states do."""
    waits = isinstance(model, ExpertsConfig) or bool(model.state_parts)
    return kernels if isinstance(kernels, RecordableKernels) and not waits else None


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of sequences that steps are padded to: powers of two, and multiples of 8."""
    powers = (size for size in (1, 2, 4) if size < max_num_seqs)
    return (*powers, *range(8, max_num_seqs, 8), max_num_seqs)


class Computed(NamedTuple):
    """The results of a step, until the next one."""

    logits: Tensor  # [num_samples, vocab_size]
    best: Tensor  # [num_samples]: of each row, as `best_tokens` returns them
    best_ids: Tensor


class CudaGraphs:
    """The graphs of one model and KV cache, which share the memory of their inputs and of their work."""

    def __init__(
        self, model: Model, kernels: RecordableKernels, cache: KVCache, padding: Padding, max_model_len: int
    ) -> None:
        """For steps of sequences with up to `max_model_len` tokens, padded by `padding`."""
        self._model, self._kernels, self._cache, self._padding = model, kernels, cache, padding
        max_blocks = -(-max_model_len // cache.layout.block_size)
        num_numbers = kernels.plan_size(padding.sizes[-1], max_blocks)
        self._plan = torch.zeros(num_numbers, dtype=torch.int32, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Graph] = {}

    def run(self, batch: ForwardBatch) -> Computed | None:
        """Compute the step, which is in host memory; None if no graph can.

        A graph is recorded if there is none of this size.
        """
        size = len(batch.token_ids)
        if not batch.is_decode or size not in self._padding.sizes:
            return None
        return self._graph(size).replay(batch)

    def record_next(self) -> bool:
        """Record one graph more, the largest that is missing; False if there are all."""
        size = max((size for size in self._padding.sizes if size not in self._graphs), default=None)
        if size is not None:
            self._graph(size)
        return size is not None

    def _graph(self, size: int) -> _Graph:
        if size not in self._graphs:
            block_size = self._cache.layout.block_size
            padding = make_batch(SchedulerOutput(()), block_size, self._padding.of_size(size))
            numbers = padding.numbers.to(self._model.device)
            batch = padding.with_numbers(numbers)
            attention = self._kernels.recordable_attention(batch, self._cache, self._plan)
            self._graphs[size] = _Graph(self._model, batch, numbers, attention, self._pool)
        return self._graphs[size]


class _Graph:
    def __init__(
        self,
        model: Model,
        batch: ForwardBatch,
        numbers: Tensor,
        attention: RecordableAttention,
        pool: Any,
    ) -> None:
        """Record the step `batch`, whose tensors are views of `numbers`, in the memory of `pool`."""
        self._numbers, self._attention = numbers, attention

        def compute() -> Computed:
            logits = model.logits(model.forward(batch, attention))
            return Computed(logits, *best_tokens(logits))

        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # before: kernels are compiled and loaded, and libraries take memory
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=pool):
            self._computed = compute()

    def replay(self, batch: ForwardBatch) -> Computed:
        self._numbers.copy_(batch.numbers)
        self._attention.lay_out(batch)
        self._graph.replay()
        num_samples = batch.num_samples
        return Computed(*(tensor[:num_samples] for tensor in self._computed))
