"""Matrix products: of numbers of the dtype, or of integers, for which activations are quantized to 8 bits.

A row's result has the same bits whatever other rows a step has, and with any number of threads (floats.h, integers.h).
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels import Computed
from trioengine.worker.kernels.addresses import address
from trioengine.worker.kernels.best_tokens import Best
from trioengine.worker.kernels.huge_pages import HugePages
from trioengine.worker.kernels.integer_weights import IntegerWeight, num_pairs, pack_integers

ROW_GROUP = 4  # floats.h's, or more
PAIR_SIZE = 88  # bytes of integers.h's RowPair
UNIT_STEP = 16  # products.h's, or more
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
FUNCTIONS: Mapping[str, tuple[type, ...]] = {
    "packed_size": (_COUNT, _COUNT),
    "pack": (_ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "linear": (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
    "linear_to_floats": (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
}


class WeightAddress(ctypes.Structure):
    """weight.h's Weight."""

    _fields_ = (
        ("data", _ADDRESS),
        ("units", _ADDRESS),
        ("bias", _ADDRESS),
        ("outputs", _COUNT),
        ("inputs", _COUNT),
        ("bits", _INT),
        ("has_minima", ctypes.c_bool),
    )


class InputsAddress(ctypes.Structure):
    """products.h's Inputs."""

    _fields_ = tuple((name, _ADDRESS) for name in ("pairs", "units", "values"))


@dataclass(slots=True)
class ProfiledPart:
    """A part of a step: its time, and, of a product, its operations (two for a term of a sum) and its weights."""

    seconds: float = 0.0
    integer_operations: int = 0
    float_operations: int = 0
    weight_bytes: int = 0  # that were read, once a call


class Profile:
    """The parts of steps, by name, added up.

    The parts before a layer's products include the preparation of their inputs, such as the quantization.
    """

    def __init__(self) -> None:
        self.parts: dict[str, ProfiledPart] = {}

    def add(self, name: str, seconds: float) -> ProfiledPart:
        """Add the time of one call; returns the part."""
        part = self.parts.setdefault(name, ProfiledPart())
        part.seconds += seconds
        return part

    def add_product(self, name: str, seconds: float, layers: Iterable[tuple[NativeLinear, int]]) -> None:
        """Add the time of products, each with its number of rows."""
        part = self.add(name, seconds)
        for layer, rows in layers:
            operations = 2 * rows * layer.in_features * layer.out_features
            if layer.is_integer:
                part.integer_operations += operations
            else:
                part.float_operations += operations
            part.weight_bytes += layer.weight_bytes


class Products:
    """Makes linear layers on the CPU, whose results are of the dtype, or of `out_dtype`, float32.

    Sums are in float32, so those results are not rounded. While `profile` is set, calls add their times to it.
    """

    def __init__(self, native: ctypes.CDLL, dtype: torch.dtype) -> None:
        """`native`: the library that is compiled for the dtype."""
        self.native, self.dtype = native, dtype
        native.packed_size.restype = _COUNT
        self._pages = HugePages()
        self.scratch = Scratch()
        self.floats = RecycledFloats()
        self.results = Results()
        self.profile: Profile | None = None

    def make(self, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> NativeLinear:
        """The layer of a weight [out_features, in_features] and a bias, both of the dtype and contiguous.

        Raises MemoryError.
        """
        outputs, inputs = weight.shape
        packed = self._pages.take(self.native.packed_size(outputs, inputs))
        self.native.pack(address(weight, self.dtype), outputs, inputs, packed.data_ptr())
        place = WeightAddress(packed.data_ptr(), None, self._bias(bias, outputs), outputs, inputs, 0, False)
        return NativeLinear(self, place, (packed, bias), out_dtype)

    def make_integer(
        self, weight: IntegerWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> NativeLinear:
        """The layer of a weight of which `can_multiply`. Raises MemoryError."""
        weight = weight.with_bits(4 if weight.bits == 4 else 8)
        if weight.minima is None and weight.zero != 1 << (weight.bits - 1):
            weight = weight.with_minima()
        (packed, units), (outputs, inputs) = pack_integers(weight, self._pages), weight.codes.shape
        place = WeightAddress(packed.data_ptr(), units.data_ptr(), self._bias(bias, outputs), outputs, inputs)
        place.bits, place.has_minima = weight.bits, weight.minima is not None
        return NativeLinear(self, place, (packed, units, bias), out_dtype)

    def release(self) -> None:
        """Give the memory of steps back. Weights that are made from now on share no pages with those before."""
        self._pages.release()
        self.scratch.release()
        self.floats.release()
        self.results.release()

    def _bias(self, bias: Tensor | None, outputs: int) -> int | None:
        if bias is not None and bias.shape != (outputs,):
            raise InvariantError(f"a product of {outputs} outputs got a bias {list(bias.shape)}")
        return None if bias is None else address(bias, self.dtype)


class RecycledFloats:
    """Memory for results in float32, which is used again when no tensor has the latest results any more.

    The logits of a step are megabytes: clearing the pages of fresh memory would take a sixth of the product's time.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.float32)
        self._latest: Callable[[], object | None] = _nothing

    def take(self, rows: int, columns: int) -> Tensor:
        """Room for results [rows, columns], uninitialized."""
        size = rows * columns
        if self._latest() is not None or self._memory.size < size:
            self._memory = np.empty(size, dtype=np.float32)
        results = self._memory[:size].reshape(rows, columns)
        self._latest = weakref.ref(results)  # which the tensor and its views hold
        return torch.from_numpy(results)

    def release(self) -> None:
        """Give the memory back; the next step takes it again."""
        self._memory, self._latest = np.empty(0, dtype=np.float32), _nothing


def _nothing() -> None:
    return None


class Results:
    """Memory for the logits of steps and their best tokens.

    A step with as many rows as the one before gets the same tensors, and overwrites them. To make new ones takes 80
    microseconds after a step that has read more than the CPU's caches hold.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)
        self._latest: Computed | None = None

    def take(self, rows: int, columns: int) -> Computed:
        """Room for logits [rows, columns], uninitialized, until the next call."""
        if self._latest is None or self._latest.logits.shape != (rows, columns):
            if len(self._memory) < rows * columns:
                self._memory = torch.empty(rows * columns, dtype=torch.float32)
            best = Best(torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64))
            self._latest = Computed(self._memory[: rows * columns].view(rows, columns), best)
        return self._latest

    def release(self) -> None:
        """Give the memory back; the next step takes it again."""
        self._memory, self._latest = torch.empty(0, dtype=torch.float32), None


class Scratch:
    """Memory between operations, which grows, and is kept from one step to the next, until `release`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.version = 0  # grows with each change of an address

    def reserve(self, name: str, elements: int, dtype: torch.dtype) -> int:
        """The address of room for this number of elements of the dtype, until the next call with the name.

        A name has one dtype. Raises InvariantError for another.
        """
        held = self._tensors.get(name)
        if held is not None and held.dtype != dtype:
            raise InvariantError(f"the scratch {name!r} has {held.dtype}, and {dtype} is asked for")
        if held is None or len(held) < elements:
            held = self._tensors[name] = torch.empty(elements, dtype=dtype)
            self.version += 1
        return held.data_ptr()

    def reserve_inputs(self, rows: int, columns: int) -> InputsAddress:
        """Room for `rows` rows of at most `columns` columns, prepared for any product."""
        return InputsAddress(
            self.reserve("pairs", rows * num_pairs(columns) * PAIR_SIZE, torch.uint8),
            self.reserve("units", rows * UNIT_STEP, torch.float32),
            self.reserve("values", (rows + ROW_GROUP - 1) * (columns + 1), torch.float32),
        )

    def release(self) -> None:
        """Give the memory back; the next step takes it again."""
        self._tensors.clear()
        self.version += 1


class NativeLinear:
    """A linear layer; its input is of the dtype of the products. For one thread at a time."""

    def __init__(
        self,
        products: Products,
        place: WeightAddress,
        memory: tuple[Tensor | None, ...],
        out_dtype: torch.dtype | None,
    ) -> None:
        """`place` has addresses in `memory`, the packed weight first; results are of `out_dtype`, or the dtype."""
        self.products, self.address = products, place
        if out_dtype not in (None, products.dtype, torch.float32):
            raise InvariantError(f"a product in {products.dtype} with results in {out_dtype}")
        self._gives_floats = (out_dtype or products.dtype) == torch.float32
        self._run = products.native.linear_to_floats if self._gives_floats else products.native.linear
        self.out_features, self.in_features = int(place.outputs), int(place.inputs)
        self.weight_bytes, self.is_integer = sum(part.nbytes for part in memory if part is not None), bool(place.bits)
        self._memory = memory

    def __call__(self, x: Tensor) -> Tensor:
        products, rows = self.products, len(x)
        if x.dtype != products.dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            raise InvariantError(
                f"a product of {self.in_features} columns in {products.dtype} got {list(x.shape)} in {x.dtype}"
            )
        x = x.contiguous()
        shape = rows, self.out_features
        result = products.floats.take(*shape) if self._gives_floats else x.new_empty(shape)
        room = ctypes.byref(products.scratch.reserve_inputs(rows, self.in_features))
        began = time.perf_counter()
        self._run(ctypes.byref(self.address), x.data_ptr(), rows, room, result.data_ptr())
        if products.profile is not None:  # no other layer of a text model is called alone
            products.profile.add_product("head", time.perf_counter() - began, [(self, rows)])
        return result
