"""Matrix products of integers: activations of 8 bits, and weights of 4 or 8 bits in groups of GROUP columns.

A row's result has the same bits whatever other rows a step has, and with any number of threads (integers.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.compiler import load_library
from trioengine.worker.kernels.linear import GROUP, joined

PANEL = 16  # outputs whose codes lie together
_PANELS = 2  # that are read together
_SOURCE = Path(__file__).with_name("decoder.cpp")
_ALIGNMENT = 64  # bytes: a step's codes are one line of the cache
_LARGEST = 127  # of a code of 8 bits with a sign
_OFFSET = 128  # that makes it positive
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FUNCTIONS = {
    "linear": (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
    "decode": (_ADDRESS, _ADDRESS, _ADDRESS),
}


class WeightAddress(ctypes.Structure):
    """A weight as integers.h has it."""

    _fields_ = (
        ("data", _ADDRESS),
        ("bias", _ADDRESS),
        ("panels", _COUNT),
        ("groups", _COUNT),
        ("zero", _INT),
        ("bits", _INT),
        ("has_minima", ctypes.c_bool),
    )


class ActivationsAddress(ctypes.Structure):
    """Quantized rows as integers.h has them."""

    _fields_ = tuple((name, _ADDRESS) for name in ("codes", "scales", "offsets", "sums", "counts"))


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

    def __init__(self, dtype: torch.dtype, macros: Mapping[str, str | int]) -> None:
        """Load the library, compiled now if it never was before. Raises KernelsUnavailable, with the reason.

        `macros` are the native kernels', of the same dtype.
        """
        self.dtype = dtype
        self.native = load_library(_SOURCE, macros, tuple(_FUNCTIONS))
        for name, types in _FUNCTIONS.items():
            function = getattr(self.native, name)
            function.argtypes, function.restype = types, None
        self.quantized = QuantizedRows()

    def make(self, weight: IntegerWeight, bias: Tensor | None = None) -> IntegerLinear:
        """The layer of a weight of which `can_multiply`."""
        return IntegerLinear(self, weight, bias)


class QuantizedRows:
    """Memory for the activations of one product at a time; it grows, and is kept for the next one."""

    def __init__(self) -> None:
        self._codes = torch.empty(0, dtype=torch.int8)
        self._factors = torch.empty((4, 0))  # float32 or int32
        self.address = ActivationsAddress()

    def reserve(self, elements: int) -> None:
        """Make room for so many rows times columns."""
        if elements > len(self._codes):
            self._codes = torch.empty(elements, dtype=torch.int8)
            self._factors = torch.empty((4, elements // GROUP))
            self.address = ActivationsAddress(self._codes.data_ptr(), *(row.data_ptr() for row in self._factors))


class IntegerLinear:
    """A linear layer; its input is of the dtype of the products. For one thread at a time."""

    def __init__(self, products: IntegerProducts, weight: IntegerWeight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.codes.shape
        self.products = products
        self._memory = _pack(weight), bias
        self.address = WeightAddress(
            self._memory[0].data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.out_features // PANEL,
            self.in_features // GROUP,
            weight.zero,
            weight.bits,
            weight.minima is not None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        products, rows = self.products, len(x)
        if x.dtype != products.dtype:
            raise InvariantError(f"a product of {products.dtype} got {x.dtype}")
        x = x.contiguous()
        products.quantized.reserve(x.numel())
        result = x.new_empty((rows, self.out_features))
        quantized = ctypes.byref(products.quantized.address)
        products.native.linear(ctypes.byref(self.address), x.data_ptr(), rows, quantized, result.data_ptr())
        return result


def _pack(weight: IntegerWeight) -> Tensor:
    """The bytes of Weight.data in integers.h, aligned."""
    rows, columns = weight.codes.shape
    panels, groups = rows // PANEL, columns // GROUP
    steps = weight.codes.view(panels, PANEL, columns // 4, 4).transpose(1, 2).reshape(panels, -1, 4 * PANEL)
    if weight.bits == 4:
        steps = steps[:, 0::2] | steps[:, 1::2] << 4
    totals = weight.dequantize().view(rows, groups, GROUP).sum(dim=2)
    parts = [steps.view(panels, groups, -1), _halves(weight.scales), _halves(totals)]
    if weight.minima is not None:
        parts.append(_halves(weight.minima))
    whole = panels // _PANELS * _PANELS
    streams = [_stream(parts, slice(0, whole), _PANELS), _stream(parts, slice(whole, panels), 1)]
    size = sum(map(len, streams))
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return torch.cat(streams, out=memory[start : start + size])


def _stream(parts: Sequence[Tensor], panels: slice, together: int) -> Tensor:
    """The panels of all parts [panels, groups, bytes], so many together, a group after the other."""
    joined_groups = (
        part[panels].view(-1, together, *part.shape[1:]).transpose(1, 2).flatten(2) for part in parts
    )  # [panels / together, groups, together * bytes]
    return torch.cat(list(joined_groups), dim=2).flatten()


def _halves(values: Tensor) -> Tensor:
    """[rows, groups] -> [panels, groups, 2 * PANEL] bytes of float16."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).half().contiguous().view(torch.uint8)
