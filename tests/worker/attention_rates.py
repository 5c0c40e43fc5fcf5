"""Measure the native attention of one layer: microseconds, and the rate at which keys and values are read.

Usage, with the root in PYTHONPATH: python tests/worker/attention_rates.py [THREADS [INSTRUCTIONS]]

For steps of one new token, of a chunk of a prompt, and of many sequences, behind contexts of several lengths, in every
dtype of the KV cache; the shape is the default model's. There are as many layers, so that steps of one token read
memory. INSTRUCTIONS, such as AVX2: the best that are used. Between the rounds memory is read in its order, because its
rate changes from second to second on some hosts.
"""

import ctypes
import statistics
import sys
import time

import numpy as np
import torch

from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.huge_pages import reserve
from trioengine.worker.kernels.kv_cache import KVCache, KVLayout
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.roof import load_roof

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
LAYERS = 30
MEMORY = 128 << 20  # bytes
DTYPES = ((torch.float32, None), (torch.float32, torch.int8), (torch.bfloat16, None), (torch.bfloat16, torch.int8))
STEPS = (  # sequences, new tokens and context of each
    *((1, 1, context) for context in (512, 2048, 8000)),
    *((128, 1, context) for context in (16, 48, 192)),
    *((1, 256, context) for context in (256, 2048, 8000)),
)


def make_step(sequences: int, new: int, context: int) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    width = -(-context // BLOCK)
    blocks = torch.randperm(sequences * width, generator=torch.Generator().manual_seed(0)).view(sequences, width)
    places = torch.arange(context - new, context)
    slots = blocks[:, places // BLOCK] * BLOCK + places % BLOCK
    counts = [np.full(sequences, count) for count in (new, context)]
    return ForwardBatch(
        nothing, nothing, slots.flatten(), nothing, blocks.numpy(), *counts, sequences * (new == 1), BLOCK
    )  # fmt: skip


def main(threads: str = "1", instructions: str | None = None) -> None:
    torch.set_num_threads(int(threads))
    print(f"{torch.get_num_threads()} threads")
    memory, native = reserve(MEMORY).fill_(1), load_roof()

    def read() -> None:
        native.read(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(MEMORY // 4))

    for dtype, cache_dtype in DTYPES:
        kernels = NativeKernels(HEADS, KV_HEADS, HEAD_DIM, dtype, BLOCK, instructions, cache_dtype)
        layout = KVLayout(kernels.cache_dtype, BLOCK, KV_HEADS, HEAD_DIM, kernels.cache_order)
        for sequences, new, context in STEPS:
            cache = KVCache(layout, sequences * -(-context // BLOCK), LAYERS, torch.device("cpu"))
            for tensor in (*cache.layers, *cache.scales):
                tensor.fill_(1)
            heads = torch.randn(sequences * new, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
            attention = kernels.attention(make_step(sequences, new, context), cache)
            times, reads = [], []
            for _ in range(2 + 600 // (sequences * new + 20)):
                began = time.perf_counter()
                for layer in range(LAYERS):
                    attention.forward(layer, heads, HEAD_DIM**-0.5)
                ended = time.perf_counter()
                read()
                times.append((ended - began) / LAYERS)
                reads.append(time.perf_counter() - ended)
            seconds = statistics.median(times[1:])
            rate = sequences * context * layout.token_bytes / seconds / 1e9
            print(
                f"{dtype}, cache {layout.dtype}: {sequences} x {new} of {context}: {1e6 * seconds:.0f} us, "
                f"{rate:.1f} GB/s; memory {MEMORY / statistics.median(reads) / 1e9:.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
