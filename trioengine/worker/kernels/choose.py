"""Which kernels a model gets."""

from __future__ import annotations

import sys

import torch

from trioengine.core.errors import ModelError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels.compiler import CompilerMissing, KernelsUnavailable
from trioengine.worker.kernels.kernels import Kernels
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels


def choose_kernels(name: str, model: TextConfig, dtype: torch.dtype, device: torch.device, block_size: int) -> Kernels:
    """`auto`: native on a CPU with a compiler, else torch. ModelError: `native` is asked for, and cannot be had."""
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        return TorchKernels(model.num_heads)
    try:
        if device.type != "cpu":
            raise KernelsUnavailable(f"they are for the CPU, not for {device}")
        return NativeKernels(model.num_heads, model.num_kv_heads, model.head_dim, dtype, block_size)
    except KernelsUnavailable as exc:
        if name == "native":
            raise ModelError(f"there are no native kernels: {exc}; choose kernels auto or torch") from exc
        if not isinstance(exc, CompilerMissing):  # which is nothing special, and doctor's to tell
            sys.stderr.write(f"trioengine: no native kernels, torch's are slower: {exc}\n")
        return TorchKernels(model.num_heads)
