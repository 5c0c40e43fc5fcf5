"""The fixed properties of a loaded model, and its weights: loaded, asleep, awake and replaced.

Weights are in one of three states: awake, on the device; kept, with their values in host memory and the device's memory
given back; discarded, in the checkpoint only. An update discards the old ones before it loads the new ones, so that the
device never needs room for both.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, UntypedStorage

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.hub.adapter import adaptable_matrices, read_adapter
from trioengine.hub.model_config import ModelConfig, TextConfig
from trioengine.worker.kernels import Kernels
from trioengine.worker.kernels.adapters import LoadedAdapter
from trioengine.worker.kernels.kv_cache import KVCache, KVLayout, size_caches
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.models import Model, load_model
from trioengine.worker.runner.adapters import load_low_rank
from trioengine.worker.runner.kernel_choice import StepGraphs, choose_graphs, choose_kernels
from trioengine.worker.runner.linear_choice import LinearChoice
from trioengine.worker.scheduling.sequence import OnProgress
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.checkpoint import Checkpoint, Projection, WeightReader

_PRECISION = 1e-6  # GGUF files hold float32
_LIBC = ctypes.CDLL(None)
_HAS_GLIBC_MALLOC = hasattr(_LIBC, "malloc_trim")
_M_ARENA_MAX = -8  # of malloc.h


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model's shape, where and how it runs, and the size of its KV cache."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int  # of a step
    max_model_len: int  # tokens; never more than the KV cache holds
    num_blocks: int
    num_state_slots: int  # 0: the model has no states
    layout: KVLayout
    kernels: Kernels
    graphs: StepGraphs
    linears: LinearChoice
    quantization: str  # of the checkpoint that is loaded first

    @staticmethod
    def read(config: WorkerConfig) -> ModelSpec:
        """Decide by the configuration and the checkpoint's header. Raises ModelError, with the file or the reason."""
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        with contextlib.closing(open_checkpoint(config.model_path)) as checkpoint:
            model = checkpoint.config
            _check_pillow(config.model_path, model)
            weights = sum(map(math.prod, model.wanted_tensors().values())) * dtype.itemsize
            layout = _layout_of(config, model.text, dtype)
            kernels = choose_kernels(config, model.text, dtype, device, layout.dtype)
            graphs = choose_graphs(config, model.text, kernels)
            num_reserved = 0 if graphs is StepGraphs.NONE else 1
            num_blocks, num_slots = size_caches(
                config, model.text, layout, dtype, device, weights, num_reserved=num_reserved
            )
            limits = (model.text.max_position_embeddings, num_blocks * config.block_size, config.max_model_len)
            max_model_len = min(limit for limit in limits if limit is not None)
            layout = replace(layout, transposes_keys=kernels.transposes_keys)
            linears = LinearChoice(config, kernels)
            quantization = linears.quantization_of(checkpoint)
            sizes = config.max_num_seqs, max_model_len, num_blocks, num_slots
            return ModelSpec(model, device, dtype, *sizes, layout, kernels, graphs, linears, quantization)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Checkpoint]:
        """Open a checkpoint that fits. Raises ModelError if it does not, by its headers alone."""
        with contextlib.closing(open_checkpoint(path)) as checkpoint:
            model = checkpoint.config
            differences = list(_differences(self.model, model))
            if differences:
                raise ModelError(f"{path} is another model: {', '.join(differences)}")
            if model.text.max_position_embeddings < self.max_model_len:
                context = f"a context of {model.text.max_position_embeddings} tokens"
                raise ModelError(f"{path} has {context}, and {self.max_model_len} are in use")
            yield checkpoint

    def allocate_caches(self) -> tuple[KVCache, StateCache | None]:
        """The KV cache, and that of states, if the model has any; ModelError where the memory cannot be had."""
        parts = self.model.text.state_parts
        states = StateCache(parts, self.num_state_slots, self.dtype, self.device) if parts else None
        num_blocks = self.num_blocks + (self.graphs is not StepGraphs.NONE)
        return KVCache(self.layout, num_blocks, self.model.text.num_kv_layers, self.device), states


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


def _layout_of(config: WorkerConfig, model: TextConfig, dtype: torch.dtype) -> KVLayout:
    """The layout for kernels that do not transpose keys."""
    cache_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
    return KVLayout(cache_dtype, config.block_size, model.num_kv_heads, model.head_dim, transposes_keys=False)


def _check_pillow(path: str, model: ModelConfig) -> None:
    if model.images is not None and importlib.util.find_spec("PIL") is None:
        raise ModelError(f"{path}: images need Pillow (the extra `vision`), which is not installed: pip install pillow")


def _differences(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
    if ours.model_type != theirs.model_type:
        yield f"model_type is {theirs.model_type}, not {ours.model_type}"
        return
    others = dict(_forward_fields(asdict(theirs)))
    for name, value in _forward_fields(asdict(ours)):
        if not _is_same(value, others[name]):
            yield f"{name} is {others[name]}, not {value}"


def _forward_fields(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """All fields but the length of the context, which the forward pass does not depend on."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _forward_fields(value, f"{prefix}{name}.")
        elif name != "max_position_embeddings":
            yield prefix + name, value


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=_PRECISION)
    return ours == theirs


@dataclass(frozen=True, slots=True)
class _Awake:
    model: Model
    projections: Mapping[Linear, Sequence[Projection]]
    tensors: list[Tensor]  # those that are not in host memory


@dataclass(frozen=True, slots=True)
class _Kept:
    loaded: _Awake
    values: HostCopy


@dataclass(frozen=True, slots=True)
class _Discarded:
    """The weights are in the checkpoint only."""


class ModelWeights:
    """The weights of one path, asleep at first; there are never two copies of them on the device."""

    def __init__(self, spec: ModelSpec, path: str, on_progress: OnProgress) -> None:
        self._spec = spec
        self._path = path
        self._on_progress = on_progress
        self._state: _Awake | _Kept | _Discarded = _Discarded()

    @property
    def model(self) -> Model:
        """InvariantError while the weights sleep."""
        if not isinstance(self._state, _Awake):
            raise InvariantError("a forward pass while the weights sleep")
        return self._state.model

    @property
    def are_awake(self) -> bool:
        return isinstance(self._state, _Awake)

    def load_adapter(self, path: str) -> LoadedAdapter:
        """Load an adapter for this model. Raises ModelError, naming the file and the reason, if it does not fit."""
        state = self._state
        if not isinstance(state, _Awake):
            raise InvariantError("an adapter is loaded while the weights sleep")
        changes = read_adapter(Path(path), adaptable_matrices(self._spec.model))
        found: list[LoadedAdapter] = []

        def load() -> None:
            spec = self._spec
            found.append(load_low_rank(changes, state.projections, spec.linears.exact, spec.dtype, spec.device))

        if (failure := failure_of(load)) is not None:
            raise ModelError(f"adapter {path}: {failure}")
        return found[0]

    def keep(self) -> None:
        """Sleep, and stay in host memory, unless they are discarded already."""
        self._spec.linears.release()
        if isinstance(self._state, _Awake):
            self._state = _Kept(self._state, HostCopy(self._state.tensors))

    def wake(self) -> None:
        """Restore or load the weights. With one of `failure_of`'s errors they sleep as before."""
        match self._state:
            case _Kept(loaded, values):
                values.restore()
                self._state = loaded
            case _Discarded():
                self._state = self._load()

    def update(self, path: str) -> str:
        """Replace the weights by the ones at `path`, loaded at once if these are awake, else at `wake`.

        Returns their quantization. Raises ModelError if they do not fit or cannot be loaded, and the old ones stay;
        RuntimeError if the old ones cannot be loaded again.
        """
        quantization = self._check(path)
        is_awake, old = self.are_awake, self._path
        self._change_to(path)
        if not is_awake or (failure := failure_of(self.wake)) is None:
            return quantization
        self._change_to(old)
        if (second := failure_of(self.wake)) is not None:
            raise RuntimeError(f"{path}: {failure}; and the old weights cannot be loaded again: {second}")
        raise ModelError(failure)

    def _check(self, path: str) -> str:
        """Return the quantization of a checkpoint that fits. Raises ModelError if it does not, or cannot be read."""
        found: list[str] = []

        def read() -> None:
            with self._spec.opened(path) as checkpoint:
                found.append(self._spec.linears.quantization_of(checkpoint))

        if (failure := failure_of(read)) is not None:
            raise ModelError(failure)
        return found[0]

    def _change_to(self, path: str) -> None:
        self._state = _Discarded()
        self._spec.linears.release()
        give_back(self._spec.device)
        self._path = path

    def _load(self) -> _Awake:
        spec = self._spec
        with spec.opened(self._path) as checkpoint, torch.inference_mode():
            wanted, linears = checkpoint.config.wanted_tensors(), spec.linears.of(checkpoint)
            reader = WeightReader(checkpoint, wanted, spec.dtype, spec.device, self._on_progress, linears)
            model = load_model(checkpoint.config, reader, spec.kernels, spec.max_model_len)
            tensors = [tensor for tensor in reader.in_use() if tensor.device.type != "cpu"]
            return _Awake(model, reader.projections, tensors)


class HostCopy:
    """The values of tensors in host memory; the tensors' own storage is empty until `restore`.

    The tensors stay the same objects, wherever they are held; meanwhile they must not be read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move the values, one storage at a time; views of one storage may be among the tensors."""
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._copies = [(storage, _moved(storage)) for storage in storages.values()]

    def restore(self) -> None:
        """Move the values back. RuntimeError, where the device has no room for all: then they are still here."""
        try:
            for storage, values in self._copies:
                storage.resize_(values.nbytes())
                storage.copy_(values)
        except RuntimeError:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise


def _moved(storage: UntypedStorage) -> UntypedStorage:
    values = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    values.copy_(storage)
    storage.resize_(0)
    return values


def failure_of(action: Callable[[], None]) -> str | None:
    """Return why loading or allocating failed, or None. All memory of a failed attempt is free on return."""
    try:
        action()
    except ModelError as exc:
        return str(exc)
    except (RuntimeError, MemoryError, OSError, SafetensorError) as exc:  # torch's allocators raise the first
        return f"{type(exc).__name__}: {exc}"
    return None


def share_one_arena() -> None:
    """All threads allocate from one arena from now on: each load's threads would leave some megabytes in theirs."""
    if _HAS_GLIBC_MALLOC:
        _LIBC.mallopt(_M_ARENA_MAX, 1)


def give_back(device: torch.device) -> None:
    """Collect garbage, and empty the allocators of the device and of the host."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    if _HAS_GLIBC_MALLOC:
        _LIBC.malloc_trim(0)
