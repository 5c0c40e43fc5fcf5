"""Steps of one token a sequence as CUDA graphs: the CPU starts a graph, not hundreds of kernels.

A graph is a step that was recorded once. Its kernels read and write the same memory each time, so there is one for each
of a few numbers of sequences, and steps are padded to them (`Padding`). The weights and the KV cache are where they
were: with new ones, new graphs are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Computed, Kernels, RecordableKernels
from trioengine.worker.kernels.batch import ForwardBatch, Padding, make_batch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.models import Model
from trioengine.worker.scheduling.sequence import SchedulerOutput

logger = logging.getLogger("trioengine")
_MOST_SEQUENCES = 512  # of a graph: larger steps keep a GPU busy without


Replay: TypeAlias = Callable[[ForwardBatch], Computed]


def can_record(kernels: Kernels, model: TextConfig) -> bool:
    """Whether neither the kernels nor the model's layers wait for the GPU, as layers with experts or states do."""
    return isinstance(kernels, RecordableKernels) and not (model.has_experts or model.has_states)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of sequences that steps are padded to: powers of two, then multiples of 8, up to 512."""
    largest = min(max_num_seqs, _MOST_SEQUENCES)
    powers = (size for size in (1, 2, 4) if size < largest)
    return (*powers, *range(8, largest, 8), largest)


class CudaGraphs:
    """The graphs of one model and KV cache, which share the memory of their inputs, their work and their logits."""

    def __init__(
        self, model: Model, kernels: RecordableKernels, cache: KVCache, padding: Padding, max_model_len: int
    ) -> None:
        """For steps of sequences with up to `max_model_len` tokens, padded by `padding`."""
        self._model, self._kernels, self._cache, self._padding = model, kernels, cache, padding
        plan_size = kernels.plan_size(padding.sizes[-1], -(-max_model_len // cache.layout.block_size))
        self._plan = torch.zeros(plan_size, dtype=torch.int32, device=model.device)
        self._logits: Tensor | None = None  # [the largest size, vocab_size], with the first graph
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._pool = torch.cuda.graph_pool_handle()
        self._replays: dict[int, Replay] = {}
        self._is_able = True

    def run(self, batch: ForwardBatch) -> Computed | None:
        """Compute the step, which is in host memory; None if no graph can.

        Records a graph of this size if it is missing.
        """
        size = len(batch.token_ids)
        if not batch.is_decode or size not in self._padding.sizes:
            return None
        if size not in self._replays:
            self._record(size)
        replay = self._replays.get(size)
        return None if replay is None else replay(batch)

    def record_next(self) -> bool:
        """Record one more graph, the largest that is missing; returns whether there was one."""
        missing = [size for size in self._padding.sizes if size not in self._replays]
        if not missing or not self._is_able:
            return False
        self._record(max(missing))
        return True

    def _record(self, size: int) -> None:
        """Where that fails, as for a lack of memory, no more graphs are recorded, and steps run kernel by kernel."""
        if self._is_able:
            try:
                self._replays[size] = self._recorded(size)
            except RuntimeError as exc:  # torch's
                self._is_able = False
                logger.warning(
                    "recording a CUDA graph of %d sequences failed, steps without one run kernel by kernel: %s",
                    size,
                    exc,
                )

    def _recorded(self, size: int) -> Replay:
        padding = make_batch(SchedulerOutput(()), self._cache.layout.block_size, self._padding.of_size(size))
        packed = padding.packed.to(self._model.device)
        batch = padding.with_packed(packed)
        attention = self._kernels.recordable_attention(batch, self._cache, self._plan)

        def compute() -> Tensor:
            return self._model.logits(self._model.forward(batch, attention))

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # before: kernels are compiled and loaded, and libraries take memory
            shown = compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        if self._logits is None:
            self._logits = shown.new_empty((self._padding.sizes[-1], shown.shape[1]))
        logits, graph = self._logits[:size], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits.copy_(compute())
            best = self._kernels.best(logits)

        def replay(step: ForwardBatch) -> Computed:
            packed.copy_(step.packed)
            attention.lay_out(step)
            graph.replay()
            return Computed(logits, best).first(step.num_samples)

        return replay
