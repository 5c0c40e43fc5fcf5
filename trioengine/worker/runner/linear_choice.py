"""How linear layers are made: by the configuration, the kernels, and the types in which a checkpoint stores them."""

from __future__ import annotations

import sys

import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.kernels import Kernels
from trioengine.worker.kernels.compiler import KernelsUnavailable
from trioengine.worker.kernels.linear import InvariantLinears
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.products import IntegerProducts
from trioengine.worker.weights.checkpoint import Checkpoint, LinearOptions


class LinearChoice:
    """Chooses for each checkpoint that is loaded; the library of integer products is loaded once."""

    def __init__(self, config: WorkerConfig, dtype: torch.dtype, kernels: Kernels) -> None:
        """Raises ModelError for an option that these kernels do not have."""
        self._config, self._dtype, self._kernels = config, dtype, kernels
        self._products: IntegerProducts | None = None
        self._is_missing = False  # after a failure to load them
        if config.batch_invariant and not kernels.is_batch_invariant:
            raise _needs_native("batch_invariant", kernels)
        if config.quantization in ("gguf", "int8"):
            self._require_products()

    def of(self, checkpoint: Checkpoint) -> LinearOptions:
        """Invariant in float32 where possible, and beside integers.

        `auto` takes integers where the file stores most matrices so and the CPU multiplies them fast, unless float32
        is asked for.
        """
        config, products = self._config, self._products_of(checkpoint)
        is_invariant = config.batch_invariant or self._dtype == torch.float32 or products is not None
        has_invariant = self._kernels.is_batch_invariant and is_invariant
        return LinearOptions(
            InvariantLinears(is_required=config.batch_invariant) if has_invariant else None,
            products,
            quantizes=config.quantization == "int8",
            takes_four_bit=config.quantization == "auto",
        )

    def quantization_of(self, checkpoint: Checkpoint) -> str:
        """`gguf` or `int8` where a checkpoint's products are of integers, else `none`."""
        if self._products_of(checkpoint) is None:
            return "none"
        if self._config.quantization == "int8":
            return "int8"
        return "gguf" if checkpoint.integer_share else "none"

    def release(self) -> None:
        """Give the memory of steps back."""
        if self._products is not None:
            self._products.scratch.release()

    def _products_of(self, checkpoint: Checkpoint) -> IntegerProducts | None:
        quantization = self._config.quantization
        if quantization != "auto":
            return None if quantization == "none" else self._products
        if self._config.dtype == "float32" or not torch.cpu._is_avx2_supported():
            return None
        if not (isinstance(self._kernels, NativeKernels) and checkpoint.integer_share > 0.5):
            return None
        if self._products is None and not self._is_missing:
            try:
                self._products = IntegerProducts(self._dtype, self._kernels.macros)
            except KernelsUnavailable as exc:
                self._is_missing = True
                sys.stderr.write(f"trioengine: no products of integers, others are slower: {exc}\n")
        return self._products

    def _require_products(self) -> None:
        option = f"quantization {self._config.quantization}"
        if not isinstance(self._kernels, NativeKernels):
            raise _needs_native(option, self._kernels)
        try:
            self._products = IntegerProducts(self._dtype, self._kernels.macros)
        except KernelsUnavailable as exc:
            raise ModelError(f"{option}: {exc}; choose quantization auto or none") from exc


def _needs_native(option: str, kernels: Kernels) -> ModelError:
    return ModelError(
        f"{option} needs the native kernels, and the {kernels.name} kernels are in use: "
        f"run on a CPU with g++ installed and with kernels auto or native, or without {option.split()[0]}"
    )
