"""How linear layers are made: by the configuration, the kernels, and the types in which a checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.kernels import Kernels
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.weights.checkpoint import Checkpoint, LinearOptions


class LinearChoice:
    """Chooses for each checkpoint that is loaded."""

    def __init__(self, config: WorkerConfig, kernels: Kernels) -> None:
        """Raises ModelError for an option that these kernels do not have."""
        self._quantization, self._dtype = config.quantization, config.dtype
        self._products = kernels.products if isinstance(kernels, NativeKernels) else None
        if config.batch_invariant and not kernels.is_batch_invariant:
            raise _needs_native("batch_invariant", kernels)
        if config.quantization in ("gguf", "int8") and self._products is None:
            raise _needs_native(f"quantization {config.quantization}", kernels)

    def of(self, checkpoint: Checkpoint) -> LinearOptions:
        """Choose the native kernels' products where there are any.

        `auto` takes integers where the file stores most matrices so and the CPU multiplies them fast, unless float32
        is asked for.
        """
        return LinearOptions(
            self._products,
            takes_integers=self._takes_integers(checkpoint),
            quantizes=self._quantization == "int8",
        )

    def exact(self, weight: Tensor) -> Linear:
        """A layer of numbers of the dtype, whatever the checkpoint."""
        return LinearOptions(self._products).exact(weight)

    def quantization_of(self, checkpoint: Checkpoint) -> str:
        """`gguf` or `int8` where a checkpoint's products are of integers, else `none`."""
        if not self._takes_integers(checkpoint):
            return "none"
        if self._quantization == "int8":
            return "int8"
        return "gguf" if checkpoint.integer_share else "none"

    def release(self) -> None:
        """Give the memory of steps back, and let later weights share no pages with those that are loaded."""
        if self._products is not None:
            self._products.release()

    def _takes_integers(self, checkpoint: Checkpoint) -> bool:
        if self._products is None or self._quantization != "auto":
            return self._quantization in ("gguf", "int8")
        is_fast = self._dtype != "float32" and torch.cpu._is_avx2_supported()
        return is_fast and checkpoint.integer_share > 0.5


def _needs_native(option: str, kernels: Kernels) -> ModelError:
    return ModelError(
        f"{option} needs the native kernels, and the {kernels.name} kernels are in use: "
        f"run on a CPU with g++ installed and with kernels auto or native, or without {option.split()[0]}"
    )
