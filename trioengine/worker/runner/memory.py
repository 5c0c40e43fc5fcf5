"""Memory that nobody uses any more goes back to the system: the allocators would keep it for the next one who asks."""

from __future__ import annotations

import ctypes
import gc

import torch

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves, or never


def give_back(device: torch.device) -> None:
    """Collect what is garbage, and empty the allocators of the device and of the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)
