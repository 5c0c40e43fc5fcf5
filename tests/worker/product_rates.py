"""Rates of matrix products on one thread: our own against torch's (oneDNN's), in turn.

Usage: python tests/worker/product_rates.py [ROUNDS], with the root and tests in PYTHONPATH. It prints 10 ** 9
operations a second of CPU time, two for each term of a sum: the median of the rounds, each of which has the best of
some calls.
"""

import statistics
import sys
import time

import torch

from trioengine.worker.kernels.integer_weights import to_integers
from trioengine.worker.kernels.linear import make_linear
from trioengine.worker.kernels.native_kernels import NativeKernels

SHAPES = [(3072, 576), (576, 1536)]  # outputs and inputs: SmolLM2's gate_up and down
ROWS = (1, 4, 8, 64, 512)
CALLS = 8
INSTRUCTIONS = (None, "VNNI", "AVX2")  # None: all of this CPU


def rate(linear, x, operations):
    """10 ** 9 operations a second of the fastest call."""
    seconds = []
    for _ in range(CALLS):
        began = time.thread_time()
        linear(x)
        seconds.append(time.thread_time() - began)
    return operations / min(seconds) / 1e9


def main(rounds=3):
    torch.set_num_threads(1)
    print("dtype          shape        rows      ours   our VNNI    our AVX2   int8 of ours   torch's")
    for dtype in (torch.float32, torch.bfloat16):
        libraries = [NativeKernels(9, 3, 64, dtype, 16, at_most).products for at_most in INSTRUCTIONS]
        for outputs, inputs in SHAPES:
            weight = torch.randn(outputs, inputs).to(dtype)
            linears = [library.make(weight) for library in libraries]
            linears += [libraries[0].make_integer(to_integers(weight)), make_linear(weight.clone())]
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                operations = 2 * rows * outputs * inputs
                found = [[rate(linear, x, operations) for linear in linears] for _ in range(rounds)]
                medians = [statistics.median(rates) for rates in zip(*found, strict=True)]
                print(f"{dtype!s:14} {outputs} x {inputs:<6} {rows:4}" + "".join(f"{each:12.1f}" for each in medians))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
