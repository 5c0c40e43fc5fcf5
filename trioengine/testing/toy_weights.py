"""The weights of the toy model, which are nothing but their path."""

from __future__ import annotations

import zlib
from pathlib import Path

TOY_PATH = "toy"  # of the weights that a reference has where none are named


def toy_weights(path: str) -> int:
    """The weights at a path: any other path than TOY_PATH gives other answers."""
    return 0 if path == TOY_PATH else zlib.crc32(path.encode()) | 1


def toy_adapted(weights: int, adapter: str | None) -> int:
    """The weights with the adapter at a path; None: without one."""
    return weights if adapter is None else zlib.crc32(adapter.encode(), weights) | 1


def toy_quantization(path: str) -> str:
    """`gguf` for a path with a name that begins with `quantized`, else `none`."""
    return "gguf" if Path(path).name.startswith("quantized") else "none"
