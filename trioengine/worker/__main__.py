"""`python -m trioengine.worker`: a worker, started by the supervisor only, or a report for another command.

`--probe` is for `doctor`, `--roof SECONDS [THREADS]` for `bench roof`, and `--profile CONFIGURATION REQUESTS PROMPT_LEN
OUTPUT_LEN` for `bench offline`. A report comes from a process of its own because
torch may be missing, or broken enough to take its process with it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioengine.core.config import WorkerConfig
    from trioengine.worker.scheduling.runner_interface import ModelInfo, ModelRunner, OnProgress

MARK = "report: "  # before the JSON, because libraries also print

_SPIN_COUNT = "4000"  # docs/decisions/017


def load(config: WorkerConfig, on_progress: OnProgress) -> tuple[ModelInfo, ModelRunner]:
    """Load the torch runner; torch is imported here, so that a worker that is never configured does not wait for it."""
    _spin_briefly()
    from trioengine.worker.native_library import compiling_ahead

    with compiling_ahead(config):
        from trioengine.worker.runner.model_runner import TorchModelRunner

        runner = TorchModelRunner.load(config, on_progress)
    return runner.info, runner


def _spin_briefly() -> None:
    """Let the threads of an operation spin for 4,000 turns while they wait for one another, not libgomp's 300,000.

    Other programs take the core of one thread while the others only spin. libgomp reads its environment when torch
    loads it; a user's own setting of either variable is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def probe() -> None:
    """Report torch's view of this machine, and a worker's choices of device, dtype and kernels."""
    import torch

    from trioengine.worker.compiler import KernelsUnavailable
    from trioengine.worker.kernels.native_kernels import NativeKernels
    from trioengine.worker.runner.kernel_choice import check_triton
    from trioengine.worker.runner.model_spec import choose_device, choose_dtype

    device = choose_device("auto")
    kernels, no_kernels = "native" if device.type == "cpu" else "triton", None
    try:
        if device.type == "cpu":
            shape, dtype = (9, 3, 64), choose_dtype("auto", device)  # the default model's
            NativeKernels(*shape, dtype, 16, has_states=False, has_experts=False)
        else:
            check_triton(device)
    except KernelsUnavailable as exc:
        kernels, no_kernels = "torch", str(exc)
    report = {
        "torch": torch.__version__,
        "device": str(device),
        "dtype": str(choose_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels,
        "no_kernels": no_kernels,
        "cuda": torch.version.cuda,
        "gpus": [
            {"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total}
            for index in range(torch.cuda.device_count())
            for free, total in [torch.cuda.mem_get_info(index)]
        ],
    }
    _write(report)


def report_roof(seconds: float, threads: int | None) -> None:
    """Report the peaks of this machine, each measured for so long."""
    _spin_briefly()
    import torch

    from trioengine.worker.roof import measure_roof

    if threads is not None:
        torch.set_num_threads(threads)
    _write(measure_roof(seconds))


def report_profile(configuration: str, requests: int, prompt_len: int, output_len: int) -> None:
    """Report where the time of steps goes; `configuration` is a WorkerConfig in JSON."""
    _spin_briefly()
    from trioengine.core.config import WorkerConfig
    from trioengine.worker.profile import profile_steps

    _write(profile_steps(WorkerConfig(**json.loads(configuration)), requests, prompt_len, output_len))


def _write(report: object) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(report)}\n")


def main() -> int:
    """Run a worker, or report; only a worker needs the other packages. Returns the exit status."""
    match sys.argv[1:]:
        case ["--probe"]:
            probe()
            return 0
        case ["--roof", seconds, *threads]:
            report_roof(float(seconds), int(threads[0]) if threads else None)
            return 0
        case ["--profile", configuration, *work]:
            report_profile(configuration, *map(int, work))
            return 0
    from trioengine.worker.process import run

    return run(sys.argv[1:], load)


if __name__ == "__main__":
    sys.exit(main())
