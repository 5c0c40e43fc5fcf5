"""Shapes of models for the native kernels, and the kernels that are compiled for them."""

import torch

from trioengine.worker.kernels.native_kernels import NativeKernels

LESS = ["AVX2", "0"]  # instructions, where the CPU has more
SHAPES = [  # heads, heads of keys and values, head_dim, block_size, instructions at most
    (9, 3, 64, 16, None),
    (4, 4, 128, 32, None),
    (8, 1, 16, 4, None),
    (6, 2, 40, 7, None),
    (5, 1, 8, 16, None),
    (2, 1, 256, 16, None),
    (7, 1, 24, 16, None),
    (3, 1, 9, 16, None),
    (40, 5, 256, 16, None),  # more heads of keys and values than are computed together
    (14, 7, 24, 48, None),
    (32, 2, 64, 16, None),
    *((9, 3, 64, 16, at_most) for at_most in LESS),
    *((6, 2, 40, 7, at_most) for at_most in LESS),
]


def make(shape=SHAPES[0], dtype=torch.float32, at_most=None, cache_dtype=None):
    heads, kv_heads, head_dim, block_size, less = shape
    return NativeKernels(heads, kv_heads, head_dim, dtype, block_size, at_most or less, cache_dtype)
