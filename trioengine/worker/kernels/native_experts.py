"""The experts of a layer as C++ takes them (experts.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from trioengine.worker.kernels import Experts, Routing
from trioengine.worker.kernels.products import ROW_GROUP, NativeLinear, Scratch, WeightAddress

_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64
FUNCTIONS: dict[str, tuple[type, ...]] = {
    "route": (_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _ADDRESS),
    "mix": (_ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS),
}


class RoutingAddress(ctypes.Structure):
    """experts.h's Routing."""

    _fields_ = (
        ("experts", _COUNT),
        ("chosen", _COUNT),
        ("normalizes", ctypes.c_bool),
        ("has_shared", ctypes.c_bool),
    )


class ExpertsAddress(ctypes.Structure):
    """experts.h's Experts; all null: there are none."""

    _fields_ = (
        ("routing", RoutingAddress),
        ("router", WeightAddress),
        ("gate_up", _ADDRESS),
        ("down", _ADDRESS),
        ("loads", _ADDRESS),
    )


class RoutesAddress(ctypes.Structure):
    """experts.h's Routes."""

    _fields_ = (
        ("chosen", _ADDRESS),
        ("places", _ADDRESS),
        ("weights", _ADDRESS),
        ("starts", _ADDRESS),
        ("spans", _ADDRESS),
        ("num_spans", _COUNT),
    )


class NativeExperts:
    """The addresses of a layer's experts, and the memory at them."""

    def __init__(self, experts: Experts) -> None:
        """`experts` has native linear layers only."""
        self.router = cast("NativeLinear", experts.router)
        self.gate_up = [cast("NativeLinear", mlp.gate_up) for mlp in experts.mlps]
        self.down = [cast("NativeLinear", mlp.down) for mlp in experts.mlps]
        self.num_used = experts.routing.num_used
        self._loads = torch.zeros(len(experts.mlps), dtype=torch.int64)
        self._weights = _addresses(self.gate_up), _addresses(self.down)
        self.address = ExpertsAddress(
            routing_address(experts.routing, len(experts.mlps)),
            self.router.address,
            *map(ctypes.addressof, self._weights),
            self._loads.data_ptr(),
        )

    def num_places(self, rows: int) -> int:
        """Return the most places of the rows' copies: each expert's begin with a whole group."""
        copies = rows * self.num_used
        return copies + (ROW_GROUP - 1) * min(copies, len(self.gate_up))

    def loaded(self, layers: Sequence[NativeLinear]) -> Iterator[tuple[NativeLinear, int]]:
        """The layers, one for each expert, that had rows in the last step, and the number of these."""
        return ((layer, load) for layer, load in zip(layers, self._loads.tolist(), strict=True) if load)


def routing_address(routing: Routing, count: int) -> RoutingAddress:
    """The routing to so many experts."""
    return RoutingAddress(count, routing.num_used, routing.normalizes, routing.has_shared)


def _addresses(layers: Sequence[NativeLinear]) -> ctypes.Array[WeightAddress]:
    return (WeightAddress * len(layers))(*(layer.address for layer in layers))


def reserve_routes(scratch: Scratch, experts: Sequence[NativeExperts], rows: int) -> RoutesAddress:
    """Room for the choices of the rows in any layer with experts."""
    copies = rows * max(each.num_used for each in experts)
    return RoutesAddress(
        scratch.reserve("chosen", copies, torch.int64),
        scratch.reserve("places", copies, torch.int64),
        scratch.reserve("weights", copies, torch.float32),
        scratch.reserve("starts", max(len(each.gate_up) for each in experts), torch.int64),
        scratch.reserve("spans", 3 * copies, torch.int64),
        0,
    )
