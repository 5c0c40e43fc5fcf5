"""The fixed properties of a loaded model: its shape, where and how it runs, and the sizes of its caches."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.hub.model_config import ModelConfig, TextConfig
from trioengine.worker.kernels import Kernels
from trioengine.worker.kernels.kv_cache import BlockBytes, KVCache, KVLayout, KVOrder, size_caches
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.runner.kernel_choice import StepGraphs, choose_graphs, choose_kernels
from trioengine.worker.runner.linear_choice import LinearChoice
from trioengine.worker.scheduling.sequence import NO_WINDOWS, Windows
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.checkpoint import Checkpoint, stored_sizes

_PRECISION = 1e-6  # GGUF files hold float32


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model's shape, where and how it runs, and the sizes of its caches."""

    path: str  # of the checkpoint that is loaded first
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int  # of a step
    layout: KVLayout
    kernels: Kernels
    graphs: StepGraphs
    linears: LinearChoice
    quantization: str  # of the checkpoint that is loaded first
    stored_bytes: int  # of its tensors that are read
    max_model_len: int  # tokens; never more than the KV cache holds
    num_blocks: int
    num_reserved: int  # blocks behind these, for padding
    num_state_slots: int  # 0: the model has no states
    windows: Windows  # blocks of layers with windows; without them these share the others' blocks

    @staticmethod
    def read(config: WorkerConfig) -> ModelSpec:
        """Read as `read_all` does, and return the model's alone."""
        return ModelSpec.read_all(config)[0]

    @staticmethod
    def read_all(config: WorkerConfig) -> list[ModelSpec]:
        """Decide by the configuration and the checkpoints' headers: for the model, and for the draft model, if any.

        Both have as many blocks, in the memory for both. Raises ModelError, with the file or the reason.
        """
        paths = (config.model_path, config.draft_model_path)
        specs = [_unsized(config, path) for path in paths if path is not None]
        for draft in specs[1:]:
            _check_draft(draft, specs[0], config.max_model_len)
        num_reserved = int(any(spec.graphs is not StepGraphs.NONE for spec in specs))
        model, dtype, device = specs[0].model.text, specs[0].dtype, specs[0].device
        window = _window_of(specs[0], config)
        in_windows = specs[0].block_bytes(model.num_kv_layers - model.windows.count(None)) if window else 0
        per_block = BlockBytes(sum(spec.block_bytes() for spec in specs) - in_windows, in_windows)
        weights = sum(spec.weight_bytes for spec in specs)
        sizes = size_caches(config, model, per_block, window, dtype, device, weights, num_reserved=num_reserved)
        num_blocks = sizes.num_blocks
        limits = (model.max_position_embeddings, num_blocks * config.block_size, config.max_model_len)
        return [
            replace(
                spec,
                max_model_len=min(limit for limit in limits if limit is not None),
                num_blocks=num_blocks,
                num_reserved=num_reserved,
                num_state_slots=sizes.num_slots,
                windows=sizes.windows if spec is specs[0] else NO_WINDOWS,
            )
            for spec in specs
        ]

    def block_bytes(self, num_layers: int | None = None) -> int:
        """Of a block's keys and values in so many layers, or in all."""
        num_layers = self.model.text.num_kv_layers if num_layers is None else num_layers
        return num_layers * self.layout.token_bytes * self.layout.block_size

    @property
    def weight_bytes(self) -> int:
        """Of all weights, in the model's dtype."""
        return sum(map(math.prod, self.model.wanted_tensors().values())) * self.dtype.itemsize

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Checkpoint]:
        """Open a checkpoint that fits. Raises ModelError if it does not, by its headers alone."""
        with contextlib.closing(open_checkpoint(path)) as checkpoint:
            model = checkpoint.config
            differences = list(_differences(self.model, model))
            if differences:
                raise ModelError(f"{path} is another model: {', '.join(differences)}")
            self.check_context(path, model)
            yield checkpoint

    def check_context(self, path: str, model: ModelConfig) -> None:
        """Raise ModelError for a checkpoint whose context is shorter than the one in use."""
        if model.text.max_position_embeddings < self.max_model_len:
            context = f"a context of {model.text.max_position_embeddings} tokens"
            raise ModelError(f"{path} has {context}, and {self.max_model_len} are in use")

    def allocate_caches(self) -> tuple[KVCache, StateCache | None]:
        """The KV cache, and a cache of states if the model has any. Raises ModelError if memory runs out."""
        parts = self.model.text.state_parts
        states = StateCache(parts, self.num_state_slots, self.dtype, self.device) if parts else None
        text, num_blocks = self.model.text, self.num_blocks + self.num_reserved
        windowed = [window is not None for window in text.windows] if self.windows else ()
        return KVCache(self.layout, num_blocks, text.num_kv_layers, self.device, self.windows, windowed), states


def _unsized(config: WorkerConfig, path: str) -> ModelSpec:
    """Everything but the sizes, which are 0."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        model = checkpoint.config
        _check_pillow(path, model)
        layout = _layout_of(config, model.text, dtype)
        kernels = choose_kernels(config, model.text, dtype, device, layout.dtype)
        layout = replace(layout, order=kernels.cache_order)
        linears = LinearChoice(config, kernels)
        return ModelSpec(
            path=path,
            model=model,
            device=device,
            dtype=dtype,
            max_num_seqs=config.max_num_seqs,
            layout=layout,
            kernels=kernels,
            graphs=choose_graphs(config, model.text, kernels),
            linears=linears,
            quantization=linears.quantization_of(checkpoint),
            stored_bytes=sum(stored_sizes(checkpoint, model.wanted_tensors()).values()),
            max_model_len=0,
            num_blocks=0,
            num_reserved=0,
            num_state_slots=0,
            windows=NO_WINDOWS,
        )


def _window_of(spec: ModelSpec, config: WorkerConfig) -> int:
    """The tokens that layers with windows see, if these have blocks of their own, else 0.

    They share the others' blocks if the context fits into the window, in a model with states, in padded steps, and if
    the kernels have no tables for windows.
    """
    text = spec.model.text
    context = min(text.max_position_embeddings, config.max_model_len or text.max_position_embeddings)
    window = max((window for window in text.windows if window is not None), default=context)
    shares = text.has_states or spec.graphs is not StepGraphs.NONE or not spec.kernels.has_window_tables
    is_short = window >= context and not config.window_blocks  # a restart has them if the first worker had
    return 0 if shares or is_short else window


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one. ModelError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        message = f"device {name}: there are {torch.cuda.device_count()} CUDA devices"
        raise ModelError(f"{message}; choose the device cpu or auto")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA and where the CPU multiplies it (AVX512-BF16, AMX), else float32."""
    if name == "auto":
        fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16


def _check_draft(draft: ModelSpec, target: ModelSpec, max_model_len: int | None) -> None:
    """Raise ModelError unless `draft` can draft for `target`, in a context of `max_model_len`, or of the target's."""
    for spec in (draft, target):
        for kind, is_one in (
            ("an embedding model", spec.model.text.embeds),
            ("a model with states", spec.model.text.has_states),
            ("a model with images", spec.model.images is not None),
        ):
            if is_one:
                raise ModelError(f"{spec.path} is {kind}, which draft_model (--draft-model) does not support")
    has, wants = draft.model.text.vocab_size, target.model.text.vocab_size
    if has != wants:
        raise ModelError(f"{draft.path} cannot draft for {target.path}: it has {has} tokens, not {wants}")
    context, longest = (spec.model.text.max_position_embeddings for spec in (draft, target))
    longest = longest if max_model_len is None else min(longest, max_model_len)
    if context < longest:
        reason = f"has a context of {context} tokens, and requests may have {longest}"
        hint = f"set max_model_len (--max-model-len) to {context} or less"
        raise ModelError(f"{draft.path}, the draft model, {reason}: {hint}")


def _layout_of(config: WorkerConfig, model: TextConfig, dtype: torch.dtype) -> KVLayout:
    """The layout for kernels that take rows."""
    cache_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
    return KVLayout(cache_dtype, config.block_size, model.num_kv_heads, model.head_dim, KVOrder.ROWS)


def _check_pillow(path: str, model: ModelConfig) -> None:
    if model.images is not None and importlib.util.find_spec("PIL") is None:
        raise ModelError(f"{path}: images need Pillow (the extra `vision`), which is not installed: pip install pillow")


def _differences(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
    if ours.model_type != theirs.model_type:
        yield f"model_type is {theirs.model_type}, not {ours.model_type}"
        return
    others = dict(_forward_fields(theirs))
    for name, value in _forward_fields(ours):
        if not _is_same(value, others[name]):
            yield f"{name} is {others[name]}, not {value}"


def _forward_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the fields that the forward pass depends on: neither the length of the context nor uncompared fields."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _forward_fields(value, f"{prefix}{field.name}.")
        elif field.compare and field.name != "max_position_embeddings":
            yield prefix + field.name, value


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=_PRECISION)
    return ours == theirs
