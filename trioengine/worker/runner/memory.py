"""Memory that nobody uses any more goes back to the system: the allocators would keep it for the next one who asks."""

from __future__ import annotations

import ctypes
import gc

import torch

_LIBC = ctypes.CDLL(None)
_HAS_GLIBC_MALLOC = hasattr(_LIBC, "malloc_trim")
_M_ARENA_MAX = -8  # of malloc.h


def share_one_arena() -> None:
    """All threads allocate from one arena from now on: each load's threads would leave some megabytes in theirs."""
    if _HAS_GLIBC_MALLOC:
        _LIBC.mallopt(_M_ARENA_MAX, 1)


def give_back(device: torch.device) -> None:
    """Collect what is garbage, and empty the allocators of the device and of the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if _HAS_GLIBC_MALLOC:
        _LIBC.malloc_trim(0)
