"""Rates of products of integers whose weights are read from memory, as in a step: 10 ** 9 operations a second.

Usage: python tests/worker/integer_rates.py [THREADS [ROUNDS]], with the root in PYTHONPATH. As many weights as a model
has are multiplied in turn, so that none of them is in the caches; the quantization of the rows is part of the time. It
prints the median of the rounds.
"""

import statistics
import sys
import time

import torch

from trioengine.worker.kernels.integer_weights import IntegerWeight, to_integers
from trioengine.worker.kernels.native_kernels import NativeKernels

SHAPES = [(3072, 576, 4, 40), (960, 576, 4, 80), (576, 1536, 4, 80), (49152, 576, 8, 3)]  # SmolLM2's: bits, weights
ROWS = (1, 4, 8, 64, 128, 512)


def weight(outputs, inputs, bits):
    """Of Q4_1, which has minima, or Q8_0."""
    if bits == 8:
        return to_integers(torch.randn(outputs, inputs))
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // 32).half().float()
    return IntegerWeight(codes, scales, (-7.5 * scales).half().float(), 0, bits)


def seconds(linears, x):
    began = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - began


def main(threads=1, rounds=9):
    torch.set_num_threads(threads)
    products = NativeKernels(9, 3, 64, torch.bfloat16, 16).products
    print("rows                     " + "".join(f"{rows:8}" for rows in ROWS))
    for outputs, inputs, bits, count in SHAPES:
        linears = [products.make_integer(weight(outputs, inputs, bits)) for _ in range(count)]
        rates = []
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            seconds(linears, x)
            found = statistics.median(seconds(linears, x) for _ in range(rounds))
            rates.append(2 * rows * outputs * inputs * count / found / 1e9)
        print(f"{outputs:5} x {inputs:4}, {bits} bits    " + "".join(f"{rate:8.1f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
