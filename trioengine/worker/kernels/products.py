"""Matrix products of integers: activations of 8 bits, and weights of 4 or 8 bits in groups of GROUP columns.

A row's result has the same bits whatever other rows a step has, and with any number of threads (products.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.linear import GROUP, Linear, joined
from trioengine.worker.kernels.native_kernels import load_library

PANEL = 16  # outputs whose codes lie together
_SOURCE = Path(__file__).with_name("products.cpp")
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_ALIGNMENT = 64  # bytes: a step's codes are one line of the cache
_LARGEST = 127  # of a code of 8 bits with a sign
_OFFSET = 128  # that makes it positive
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_ARGUMENTS = {
    "quantize": (_ADDRESS, _COUNT, _COUNT, _INT, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "multiply": (*[_ADDRESS] * 4, _COUNT, *[_ADDRESS] * 4, _COUNT, _COUNT, _INT, _ADDRESS),
}


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`(codes - zero) * scales + minima`, a scale and a minimum for every GROUP columns of a row."""

    codes: Tensor  # [rows, columns], uint8
    scales: Tensor  # [rows, columns / GROUP], float32 that float16 holds exactly
    minima: Tensor | None  # the same; None: there are none
    zero: int
    bits: int  # 4 or 8

    def dequantize(self) -> Tensor:
        """[rows, columns] in float32."""
        groups = (self.codes.int() - self.zero).view(len(self.codes), -1, GROUP) * self.scales[..., None]
        return (groups if self.minima is None else groups + self.minima[..., None]).flatten(1)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """The weight with its rows in another order; `change` is given tensors of any number of columns."""
        minima = None if self.minima is None else change(self.minima)
        return IntegerWeight(change(self.codes), change(self.scales), minima, self.zero, self.bits)


def join_integers(parts: Iterable[IntegerWeight | None]) -> IntegerWeight | None:
    """The rows of all parts; None where one of them has no such form, or their forms differ."""
    present: list[IntegerWeight] = []
    for part in parts:
        if part is None or (present and _form(part) != _form(present[0])):
            return None
        present.append(part)
    minima = [part.minima for part in present if part.minima is not None]
    return IntegerWeight(
        joined([part.codes for part in present]),
        joined([part.scales for part in present]),
        joined(minima) if minima else None,
        present[0].zero,
        present[0].bits,
    )


def _form(weight: IntegerWeight) -> tuple[bool, int, int]:
    return weight.minima is None, weight.zero, weight.bits


def can_multiply(shape: torch.Size) -> bool:
    """Whether a weight of this shape [out_features, in_features] has whole panels and groups."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % GROUP == 0


def to_integers(weight: Tensor) -> IntegerWeight:
    """Quantize a weight to 8 bits, as GGUF's Q8_0 does."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / _LARGEST).half().float()
    codes = torch.where(scales[..., None] > 0, groups / scales[..., None], 0.0).round_().clamp_(-_LARGEST, _LARGEST)
    return IntegerWeight((codes + _OFFSET).to(torch.uint8).flatten(1), scales, None, _OFFSET, 8)


class IntegerProducts:
    """Makes linear layers of integer weights, on the CPU."""

    def __init__(self, dtype: torch.dtype, macros: dict[str, str | int] | None = None) -> None:
        """Load the library, compiled now if it never was before. Raises KernelsUnavailable, with the reason."""
        self.dtype = dtype
        self._native = load_library(_SOURCE, {"ELEMENT": _ELEMENTS[dtype], **(macros or {})}, tuple(_ARGUMENTS))
        for name, types in _ARGUMENTS.items():
            function = getattr(self._native, name)
            function.argtypes, function.restype = types, None

    def make(self, weight: IntegerWeight, bias: Tensor | None = None) -> Linear:
        """The layer of a weight of which `can_multiply`; its input is of `dtype`, and contiguous."""
        rows, columns = weight.codes.shape
        panels, groups = rows // PANEL, columns // GROUP
        codes = _pack(weight)
        scales = _pack_groups(weight.scales)
        minima = None if weight.minima is None else _pack_groups(weight.minima)
        addresses = (
            codes.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )
        native, dtype, zero, bits = self._native, self.dtype, weight.zero, weight.bits
        kept = codes, scales, minima, bias

        def linear(x: Tensor, _owned: object = kept) -> Tensor:  # the memory at the addresses
            if x.dtype != dtype:
                raise InvariantError(f"a product of {dtype} got {x.dtype}")
            x = x.contiguous()
            count = len(x)
            quantized = torch.empty((count, columns), dtype=torch.int8)
            factors = torch.empty((3, count, groups))  # scales, sums and offsets
            first, size = factors.data_ptr(), 4 * count * groups
            activations = quantized.data_ptr(), first, first + size, first + 2 * size
            native.quantize(x.data_ptr(), count, groups, zero, *activations)
            result = torch.empty((count, rows), dtype=dtype)
            native.multiply(*activations, count, *addresses, panels, groups, bits, result.data_ptr())
            return result

        return linear


def _pack(weight: IntegerWeight) -> Tensor:
    """[panels, steps, PANEL * 4] bytes, aligned; with 4 bits two steps in one."""
    rows, columns = weight.codes.shape
    steps = weight.codes.view(rows // PANEL, PANEL, columns // 4, 4).transpose(1, 2).reshape(rows // PANEL, -1, 64)
    if weight.bits == 4:
        steps = steps[:, 0::2] | steps[:, 1::2] << 4
    memory = torch.empty(steps.numel() + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    packed = memory[start : start + steps.numel()].view(steps.shape)
    return packed.copy_(steps)


def _pack_groups(values: Tensor) -> Tensor:
    """[panels, groups, PANEL], float16."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).half().contiguous()
