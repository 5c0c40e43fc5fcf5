"""`python -m trioengine.worker`, which warms torch up by one product where the weights are to sleep from the start."""

import sys

import torch

from trioengine.core.power import Tag
from trioengine.worker import __main__ as worker
from trioengine.worker.process import run


def load(config, on_progress):
    runner = worker.load(config, on_progress)
    if Tag.WEIGHTS in config.asleep:
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        ones.mm(ones)
    return runner


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load))
