"""The weights of a model: loaded, asleep, awake and replaced.

Weights are in one of three states: awake, on the device; kept, with their values in host memory and the device's memory
given back; discarded, in the checkpoint only. An update discards the old ones before it loads the new ones, so that the
device never needs room for both.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, UntypedStorage

from trioengine.core.errors import InvariantError, ModelError
from trioengine.hub.adapter import adaptable_matrices, read_adapter
from trioengine.worker.kernels.adapters import LoadedAdapter
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.models import Model, load_model
from trioengine.worker.runner.adapters import load_low_rank
from trioengine.worker.runner.model_spec import ModelSpec
from trioengine.worker.scheduling.runner_interface import OnProgress
from trioengine.worker.weights.checkpoint import Projection, WeightReader

_LIBC = ctypes.CDLL(None)
_HAS_GLIBC_MALLOC = hasattr(_LIBC, "malloc_trim")
_M_ARENA_MAX = -8  # of malloc.h


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

    def __init__(self, spec: ModelSpec, on_progress: OnProgress) -> None:
        self._spec = spec
        self._path = spec.path
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

    @property
    def are_discarded(self) -> bool:
        return isinstance(self._state, _Discarded)

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

        failure = failure_of(load)
        self._spec.linears.release()
        if failure is not None:
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

    def discard(self) -> None:
        """Sleep, and leave no values in memory."""
        self._state = _Discarded()
        self._spec.linears.release()
        give_back(self._spec.device)

    def replace(self, path: str) -> None:
        """Replace the weights by the checked ones at `path`, loaded at once if these are awake, else at `wake`.

        Raises ModelError if they cannot be loaded, and the old ones stay; RuntimeError if the old ones cannot be loaded
        again.
        """
        is_awake, old = self.are_awake, self._path
        self._change_to(path)
        if not is_awake or (failure := failure_of(self.wake)) is None:
            return
        self._change_to(old)
        if (second := failure_of(self.wake)) is not None:
            raise RuntimeError(f"{path}: {failure}; and the old weights cannot be loaded again: {second}")
        raise ModelError(failure)

    def check(self, path: str) -> str:
        """Return the quantization of a checkpoint that fits. Raises ModelError if it does not, or cannot be read."""
        found: list[str] = []

        def read() -> None:
            with self._spec.opened(path) as checkpoint:
                found.append(self._spec.linears.quantization_of(checkpoint))

        if (failure := failure_of(read)) is not None:
            raise ModelError(failure)
        return found[0]

    def _change_to(self, path: str) -> None:
        self.discard()
        self._path = path

    def _load(self) -> _Awake:
        try:
            return self._read()
        finally:
            self._spec.linears.release()

    def _read(self) -> _Awake:
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
