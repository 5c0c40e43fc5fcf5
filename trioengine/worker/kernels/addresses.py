"""The parameters of kernels as native.cpp takes them: structures with the addresses of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels import Activation, Convolution, GatedDelta, Residual, RMSNorm, RotaryTable
from trioengine.worker.kernels.batch import IntArray, StateRows

_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ACTIVATIONS: Mapping[Activation, int] = {Activation.SILU: 0, Activation.GELU_TANH: 1}  # as rows.h's
_ALL_TOKENS = 1 << 62  # as a window
_INT64 = np.dtype(np.int64).char  # as the format of a buffer
_MAX_DELTA_DIM = 256  # delta.h's


class NormAddress(ctypes.Structure):
    """rows.h's Norm."""

    _fields_ = (("weight", _ADDRESS), ("epsilon", _FLOAT), ("size", _COUNT))


class ResidualAddress(ctypes.Structure):
    """rows.h's Residual."""

    _fields_ = (("delta_norm", NormAddress), ("scale", _FLOAT), ("norm", NormAddress))


class RotaryAddress(ctypes.Structure):
    """rows.h's Rotary."""

    _fields_ = (("table", _ADDRESS), ("size", _COUNT))


class ConvolutionAddress(ctypes.Structure):
    """convolution.h's Convolution."""

    _fields_ = (("weight", _ADDRESS), ("bias", _ADDRESS), ("taps", _COUNT), ("size", _COUNT))


class DeltaAddress(ctypes.Structure):
    """delta.h's Delta."""

    _fields_ = (
        ("convolution", ConvolutionAddress),
        ("rates", _ADDRESS),
        ("time_bias", _ADDRESS),
        ("norm", NormAddress),
        ("key_heads", _COUNT),
        ("value_heads", _COUNT),
        ("key_dim", _COUNT),
        ("value_dim", _COUNT),
    )


class StateRowsAddress(ctypes.Structure):
    """convolution.h's StateRows."""

    _fields_ = (
        ("slots", _ADDRESS),
        ("first_rows", _ADDRESS),
        ("sequence_of", _ADDRESS),
        ("saves", _ADDRESS),
        ("sequences", _COUNT),
        ("num_saves", _COUNT),
    )


def norm_address(norm: RMSNorm | None) -> NormAddress:
    """The norm; null: there is none."""
    return (
        NormAddress()
        if norm is None
        else NormAddress(address(norm.weight, torch.float32), norm.epsilon, len(norm.weight))
    )


def residual_address(residual: Residual) -> ResidualAddress:
    return ResidualAddress(norm_address(residual.delta_norm), residual.scale, norm_address(residual.norm))


def rotary_address(rotary: RotaryTable | None, dtype: torch.dtype) -> RotaryAddress:
    """The table, of `dtype`; null: no rotation."""
    return RotaryAddress() if rotary is None else RotaryAddress(address(rotary.table, dtype), rotary.size)


def convolution_address(convolution: Convolution | None) -> ConvolutionAddress:
    """The convolution; null: there is none."""
    if convolution is None:
        return ConvolutionAddress()
    bias = None if convolution.bias is None else address(convolution.bias, torch.float32)
    return ConvolutionAddress(address(convolution.weight, torch.float32), bias, *convolution.weight.shape)


def delta_address(delta: GatedDelta | None) -> DeltaAddress:
    """The delta net; null: there is none. Raises InvariantError for heads that are too large."""
    if delta is None:
        return DeltaAddress()
    if max(delta.key_dim, delta.value_dim) > _MAX_DELTA_DIM:
        raise InvariantError(f"heads of {delta.key_dim} and {delta.value_dim} elements in a delta net")
    return DeltaAddress(
        convolution_address(Convolution(delta.taps)),
        address(delta.rates, torch.float32),
        address(delta.time_bias, torch.float32),
        norm_address(delta.norm),
        delta.num_key_heads,
        delta.num_value_heads,
        delta.key_dim,
        delta.value_dim,
    )


def state_rows_address(rows: StateRows | None) -> StateRowsAddress:
    """The slots of a step's sequences; null: the model has no states."""
    if rows is None:
        return StateRowsAddress()
    tensors = rows.slots, rows.first_rows, rows.sequences, rows.saves
    return StateRowsAddress(*(address(each, torch.int64) for each in tensors), len(rows.slots), len(rows.saves))


def window_size(window: int | None) -> int:
    """The tokens that a query sees."""
    return _ALL_TOKENS if window is None else window


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address, once dtype and layout are checked: C++ would read garbage from any other tensor."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvariantError(f"a native kernel got {tensor.dtype} in strides {tensor.stride()}, not {dtype} in a row")
    return tensor.data_ptr()


def array_address(numbers: IntArray) -> int:
    """As `address`, of an array that is writable and not empty. `torch.from_numpy` would take ten times as long."""
    memory = numbers.data
    if memory.format != _INT64 or not memory.c_contiguous or memory.readonly or not memory.nbytes:
        raise InvariantError(f"a native kernel got {numbers.dtype} {numbers.shape}, not int64 in a row, or read-only")
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
