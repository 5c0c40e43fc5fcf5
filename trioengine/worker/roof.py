"""The peaks of this machine with the worker's threads: the most that a kernel can reach."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trioengine.worker.compiler import load_library
from trioengine.worker.kernels.huge_pages import reserve

_SOURCE = Path(__file__).parent / "kernels" / "roof.cpp"
_MEMORY = 256 << 20  # bytes, more than caches hold
_CHAINS = 8  # as in roof.cpp
_ROUNDS = 200_000
_FUNCTIONS = ("read", "lanes", "multiply_integers", "multiply_floats", "numbers_in_a_lane", "multiply_bfloat16")


def measure_roof(seconds: float) -> dict[str, float]:
    """Measure each peak for so long, the best of its rounds.

    Returns GB/s of memory that is read, in huge pages, and 10 ** 9 operations a second (a product and its sum are two):
    of integers of 8 bits, floats and bfloat16, in registers. Raises KernelsUnavailable.
    """
    native = load_roof()
    memory = reserve(_MEMORY).fill_(1)
    threads, count = torch.get_num_threads(), ctypes.c_int64
    operations = 2 * native.lanes() * _CHAINS * _ROUNDS * threads
    pairs = native.numbers_in_a_lane() * operations

    def read() -> None:
        native.read(ctypes.c_void_p(memory.data_ptr()), count(_MEMORY // 4))

    return {
        "threads": threads,
        "memory_gb_s": _rate(read, _MEMORY, seconds),
        "int8_gop_s": _rate(lambda: native.multiply_integers(count(_ROUNDS), count(threads)), 4 * operations, seconds),
        "float32_gop_s": _rate(lambda: native.multiply_floats(count(_ROUNDS), count(threads)), operations, seconds),
        "bfloat16_gop_s": _rate(lambda: native.multiply_bfloat16(count(_ROUNDS), count(threads)), pairs, seconds),
    }


def load_roof(at_most: str | None = None) -> ctypes.CDLL:
    """Compile roof.cpp. `at_most`: the best instructions that it uses, of lanes.h; None: this CPU's."""
    macros: dict[str, str | int] = {"ELEMENT": "float"}
    if at_most is not None:
        macros["AT_MOST"] = at_most
    native = load_library([_SOURCE], macros, _FUNCTIONS)
    native.multiply_floats.restype = native.multiply_bfloat16.restype = ctypes.c_double
    return native


def _rate(run: Callable[[], object], amount: float, seconds: float) -> float:
    """Return 10 ** 9 a second, of the fastest call."""
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        fastest = min(fastest, now - began)
        if now >= end:
            return amount / fastest / 1e9
