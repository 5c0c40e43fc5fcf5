"""Memory in huge pages: a CPU reads it faster, since its own prefetchers stop at the end of a page."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes
_SHARED = 32 << 20  # bytes of a mapping that tensors share
_LINE = 64  # bytes of a cache line


def reserve(num_bytes: int) -> Tensor:
    """Reserve uint8 [num_bytes], uninitialized, from the start of a page.

    A page takes memory once it is touched; all of it is given back with the last tensor that views it. Linux may give
    small pages in place of huge ones. Raises MemoryError if the system refuses.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise MemoryError(f"cannot reserve {num_bytes} bytes: {exc}") from exc
    with contextlib.suppress(OSError):  # of a kernel that has no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a tensor made in that mode could not be written outside of it
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + num_bytes]


class HugePages:
    """Pages shared by tensors that are made together, and dropped together. Not thread-safe."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Take uint8 [num_bytes], uninitialized, from the start of a cache line. Raises MemoryError."""
        room = -(-num_bytes // _LINE) * _LINE
        if room >= _SHARED:
            return reserve(num_bytes)
        if room > len(self._rest):
            self._rest = reserve(_SHARED)
        taken, self._rest = self._rest[:num_bytes], self._rest[room:]
        return taken

    def release(self) -> None:
        """Stop sharing the latest mapping: it is given back with the last tensor in it. Later tensors get another."""
        self._rest = torch.empty(0, dtype=torch.uint8)
