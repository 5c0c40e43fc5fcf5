"""`python -m trioengine.worker`: started by the supervisor only."""

from __future__ import annotations

import sys

from trioengine.core.config import WorkerConfig
from trioengine.worker.loop import LoadedRunner, OnProgress
from trioengine.worker.process import run


def load(config: WorkerConfig, on_progress: OnProgress) -> LoadedRunner:
    """Load the torch runner; torch is imported here, so that a worker that is never configured does not wait for it."""
    from trioengine.worker.runner.model_runner import TorchModelRunner

    return TorchModelRunner.load(config, on_progress)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load))
