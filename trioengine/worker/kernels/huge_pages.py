"""Memory in huge pages: a CPU reads it faster, since its own prefetchers stop at the end of a page."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes
_CHUNK = 32 << 20
_LINE = 64  # of a CPU's cache


def reserve(num_bytes: int) -> Tensor:
    """Reserve uint8 [num_bytes], which may hold anything, from the start of a page.

    A page takes memory once it is touched; all of it is given back with the last tensor that views it. The kernel may
    give small pages in place of huge ones. Raises MemoryError.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {exc}") from exc
    with contextlib.suppress(OSError):  # of a kernel that has no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + num_bytes]


class HugePages:
    """Pages shared by tensors that are made together, and dropped together. For one thread at a time."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Take uint8 [num_bytes], which may hold anything, from the start of a line. Raises MemoryError."""
        room = -(-num_bytes // _LINE) * _LINE
        if room > len(self._rest):
            self._rest = reserve(max(room, _CHUNK))
        taken, self._rest = self._rest[:num_bytes], self._rest[room:]
        return taken

    def release(self) -> None:
        """Give back the rest of the pages, once the tensors in them are dropped; the next tensors get others."""
        self._rest = torch.empty(0, dtype=torch.uint8)
