"""Which kernels a model runs with, and whether its steps are padded and recorded as CUDA graphs."""

from __future__ import annotations

import enum
import importlib.util
import sys

import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.compiler import CompilerMissing, KernelsUnavailable
from trioengine.worker.kernels import Kernels
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.runner.cuda_graphs import can_record

_LEAST_CAPABILITY = (8, 0)  # of GPUs that multiply bfloat16


def choose_kernels(
    config: WorkerConfig, model: TextConfig, dtype: torch.dtype, device: torch.device, cache_dtype: torch.dtype
) -> Kernels:
    """`auto`: native on a CPU with a compiler, Triton's on a GPU that has it, else torch.

    Raises ModelError for others that are asked for, and cannot be had.
    """
    name = config.kernels
    if name == "auto":
        name = "native" if device.type == "cpu" else "triton"
    try:
        if name == "native":
            return _native_kernels(config, model, dtype, device, cache_dtype)
        if name == "triton":
            check_triton(device)
            from trioengine.worker.kernels.triton_kernels import TritonKernels

            return TritonKernels(model.num_heads, dtype)
        return TorchKernels(model.num_heads, dtype)
    except KernelsUnavailable as exc:
        if config.kernels == name:
            raise ModelError(f"there are no {name} kernels: {exc}; choose kernels auto or torch") from exc
        if not isinstance(exc, CompilerMissing):  # a missing compiler is common, and reported by doctor
            sys.stderr.write(f"trioengine: no {name} kernels, torch's are slower: {exc}\n")
        return TorchKernels(model.num_heads, dtype)


def _native_kernels(
    config: WorkerConfig, model: TextConfig, dtype: torch.dtype, device: torch.device, cache_dtype: torch.dtype
) -> Kernels:
    if device.type != "cpu":
        raise KernelsUnavailable(f"they are for the CPU, not for {device}")
    shape = model.num_heads, model.num_kv_heads, model.head_dim
    return NativeKernels(
        *shape,
        dtype,
        config.block_size,
        cache_dtype=cache_dtype,
        has_states=model.has_states,
        has_experts=model.has_experts,
    )


def check_triton(device: torch.device) -> None:
    """Raise KernelsUnavailable, with the reason, if Triton's kernels do not run on the device."""
    if device.type != "cuda":
        raise KernelsUnavailable(f"they are for GPUs, not for the {device}")
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise KernelsUnavailable(f"{torch.cuda.get_device_name(device)} is older than NVIDIA's Ampere")
    if importlib.util.find_spec("triton") is None:
        raise KernelsUnavailable("triton, which comes with torch for NVIDIA GPUs on Linux, is not installed")
    try:
        import triton

        _ = triton.runtime.driver.active.utils  # compiled by gcc, as all launches of kernels are
    except Exception as exc:  # errors of the compiler, the linker or an import
        raise KernelsUnavailable(f"triton does not work: {exc}") from exc


class StepGraphs(enum.Enum):
    """Whether decoding steps are padded to a few sizes, and recorded as CUDA graphs."""

    NONE = "none"
    PAD = "pad"  # padded, not recorded
    RECORD = "record"


def choose_graphs(config: WorkerConfig, model: TextConfig, kernels: Kernels) -> StepGraphs:
    """`auto`: recorded where the kernels and the model's layers can be. An embedding model has no decoding steps."""
    if config.cuda_graphs == "none" or model.embeds:
        return StepGraphs.NONE
    if config.cuda_graphs == "pad":
        return StepGraphs.PAD
    return StepGraphs.RECORD if can_record(kernels, model) else StepGraphs.NONE
