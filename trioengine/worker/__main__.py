"""`python -m trioengine.worker`: started by the supervisor only."""

from __future__ import annotations

import os
import sys

from trioengine.core.config import WorkerConfig
from trioengine.worker.loop import LoadedRunner, OnProgress
from trioengine.worker.process import run

_SPIN_COUNT = "4000"  # docs/decisions/017


def load(config: WorkerConfig, on_progress: OnProgress) -> LoadedRunner:
    """Load the torch runner; torch is imported here, so that a worker that is never configured does not wait for it."""
    _spin_briefly()
    from trioengine.worker.runner.model_runner import TorchModelRunner

    return TorchModelRunner.load(config, on_progress)


def _spin_briefly() -> None:
    """Threads of an operation that wait for another one keep their cores for 4,000 turns, not for libgomp's 300,000.

    Anything else that runs takes the core of one thread, while the others only spin on theirs. libgomp reads its
    environment when torch loads it; whoever has set either variable knows better.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load))
