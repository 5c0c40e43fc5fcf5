"""The library of the native kernels: its sources, its macros for a model, and a compilation ahead of torch.

This module does not import torch: importing that takes one core as long as compiling the library takes another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from trioengine.core.config import WorkerConfig
from trioengine.hub.checkpoint import map_file, read_gguf, read_safetensors
from trioengine.hub.model_config import TextConfig
from trioengine.worker.compiler import compile_library, end_compilers

SOURCES = [Path(__file__).parent / "kernels" / name for name in ("native.cpp", "attention.cpp")]
SEGMENT_SIZE = 512  # tokens of a context whose sums are computed by themselves; another size changes the bits
_ELEMENTS = {"float32": "float", "bfloat16": "bfloat16", "int8": "int8_t"}
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of a Windows host, and of AMD
_TILE_BYTES = 72 << 10  # of queries, scores and results, in float32, as float_attention.h has them
_KEYS, _LANES = 64, 16  # of tile.h and lanes.h, at most


def library_macros(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    cache_dtype: str,
    block_size: int,
    *,
    has_states: bool,
    has_experts: bool,
) -> dict[str, str | int]:
    """Return the macros for a model of this shape, with torch's names of its dtype and of its KV cache's.

    Layers with states, or with experts, are compiled only for a model that has them.
    """
    group_size = num_heads // num_kv_heads
    row_bytes = 4 * (2 * -(-head_dim // _LANES) * _LANES + _KEYS)
    return {
        "ELEMENT": _ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size,
        "TILE_SIZE": max(1, _TILE_BYTES // (row_bytes * group_size)),  # tokens
        "CACHE_ELEMENT": _ELEMENTS[cache_dtype],
        "BLOCK_SIZE": block_size,
        "SEGMENT_SIZE": SEGMENT_SIZE,
        "HAS_STATES": int(has_states),
        "HAS_EXPERTS": int(has_experts),
    }


@contextmanager
def compiling_ahead(config: WorkerConfig) -> Iterator[None]:
    """Compile in another thread, while the block imports torch, the library that this model will probably load.

    Device and dtype are guessed without torch. After a wrong guess a library is kept that is not loaded, and the block
    ends when the compiler does. An exception in the block ends the compiler.
    """
    thread = threading.Thread(target=_compile_ahead, args=(config,), name="kernel compiler")
    thread.start()
    try:
        yield
    except BaseException:
        end_compilers()
        raise
    finally:
        thread.join()


def _compile_ahead(config: WorkerConfig) -> None:
    if config.kernels not in ("auto", "native") or not _is_for_cpu(config.device):
        return
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if _has_fast_bfloat16() else "float32"
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    with suppress(Exception):  # raised again, and reported, where the library is loaded
        text = _text_config(Path(config.model_path))
        macros = library_macros(
            *(text.num_heads, text.num_kv_heads, text.head_dim),
            *(dtype, cache_dtype, config.block_size),
            has_states=text.has_states,
            has_experts=text.has_experts,
        )
        compile_library(SOURCES, macros)


def _is_for_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not any(Path(name).exists() for name in _GPUS))


def _has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16, by the flags that Linux shows."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_bytes()
        return b" avx512_bf16" in flags or b" amx_tile" in flags
    return False


def _text_config(path: Path) -> TextConfig:
    if path.is_dir():
        return read_safetensors(path).config.text
    with closing(map_file(path)) as mapped, memoryview(mapped) as buffer:
        return read_gguf(buffer, path).config.text
