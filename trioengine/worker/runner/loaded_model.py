"""A model with its KV cache, states and graphs: awake, asleep, or in part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.core.power import Tag
from trioengine.worker.kernels import Attention, Computed, RecordableKernels
from trioengine.worker.kernels.batch import ForwardBatch, Padding
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.models import Model
from trioengine.worker.runner.cuda_graphs import CudaGraphs, graph_sizes
from trioengine.worker.runner.kernel_choice import StepGraphs
from trioengine.worker.runner.model_spec import ModelSpec
from trioengine.worker.runner.model_weights import ModelWeights
from trioengine.worker.scheduling.runner_interface import OnProgress
from trioengine.worker.scheduling.sequence import SchedulerOutput


class LoadedModel:
    """Computes the batches of steps. It sleeps at first; its methods that compute are called in inference mode."""

    def __init__(self, spec: ModelSpec, on_progress: OnProgress) -> None:
        self.spec = spec
        self.weights = ModelWeights(spec, on_progress)
        self.states: StateCache | None = None  # None: they sleep, with the KV cache, or the model has none
        self.padding: Padding | None = None
        if spec.graphs is not StepGraphs.NONE:
            self.padding = Padding(graph_sizes(min(spec.max_num_seqs, spec.num_blocks)), spec.num_blocks)
        self._cache: KVCache | None = None  # None: it sleeps
        self._graphs: CudaGraphs | None = None  # of these weights and this cache; None: none are recorded yet

    @property
    def model(self) -> Model:
        """InvariantError while the weights sleep."""
        return self.weights.model

    @property
    def cache(self) -> KVCache:
        """InvariantError while it sleeps."""
        if self._cache is None:
            raise InvariantError("a forward pass while the KV cache sleeps")
        return self._cache

    # ---- steps ------------------------------------------------------------------------------------------------------

    def copy(self, output: SchedulerOutput) -> None:
        """Make a step's copies of blocks and states."""
        self.cache.copy_blocks(output.copies, output.window_copies)
        if self.states is not None:
            self.states.copy(output.state_copies)

    def replay(self, batch: ForwardBatch) -> Computed | None:
        """Compute a batch, which is in host memory, by a graph; None if no graph can."""
        graphs = self._recorder()
        return None if graphs is None else graphs.run(batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a batch kernel by kernel: hidden states of its `output_rows`."""
        return self.model.forward(*self._inputs(batch))

    def compute(self, batch: ForwardBatch) -> Computed:
        """Compute a batch, which is in host memory, by a graph if there is one: its `output_rows` without padding."""
        computed = self.replay(batch)
        if computed is not None:
            return computed
        computed = self.model.compute(*self._inputs(batch))
        return computed.first(batch.num_samples) if batch.num_padding else computed

    def _inputs(self, batch: ForwardBatch) -> tuple[ForwardBatch, Attention, StateCache | None]:
        batch = batch.to(self.model.device)
        return batch, self.spec.kernels.attention(batch, self.cache), self.states

    def record_next(self) -> bool:
        """Record one more graph, if any is missing; returns whether there was one."""
        graphs = self._recorder() if self._cache is not None and self.weights.are_awake else None
        return graphs is not None and graphs.record_next()

    def _recorder(self) -> CudaGraphs | None:
        """The graphs of the weights and the cache, which are awake; None if this model's steps are not recorded."""
        if self._graphs is None and self.padding is not None and self.spec.graphs is StepGraphs.RECORD:
            kernels = cast("RecordableKernels", self.spec.kernels)
            self._graphs = CudaGraphs(self.model, kernels, self.cache, self.padding, self.spec.max_model_len)
        return self._graphs

    # ---- memory -----------------------------------------------------------------------------------------------------

    def take(self, tags: frozenset[Tag]) -> Callable[[], None]:
        """Take the memory of all of these tags, or, with an exception, of none: weights wake entirely or not.

        Returns a call that releases it: discarded weights are discarded again.
        """
        discards = self.weights.are_discarded
        caches = self.spec.allocate_caches() if Tag.KV_CACHE in tags else (self._cache, self.states)
        if Tag.WEIGHTS in tags:
            self.weights.wake()
        self._cache, self.states = caches
        return partial(self.release, tags, discards=discards)

    def release(self, tags: frozenset[Tag], *, discards: bool = False) -> None:
        """Drop the memory of these tags, and keep weights in host memory, where they stay if they are there anyway.

        `discards`: drop the weights as well.
        """
        self._graphs = None
        if Tag.KV_CACHE in tags:
            self._cache = self.states = None
        if Tag.WEIGHTS in tags and discards:
            self.weights.discard()
        elif Tag.WEIGHTS in tags:
            self.weights.keep()

    def update_weights(self, path: str) -> str:
        """As ModelRunner's."""
        quantization = self.weights.check(path)
        self._graphs = None
        self.weights.replace(path)
        return quantization
