"""What torch makes of this machine, as JSON on stdout: `python -m trioengine.worker.probe`.

A process of its own, because torch may be missing, or broken enough to take its process with it.
"""

from __future__ import annotations

import json
import sys

MARK = "probe: "  # before the JSON: libraries print, too


def main() -> None:
    """Import what a worker imports, and choose as it chooses."""
    import torch

    from trioengine.worker.kernels.compiler import KernelsUnavailable
    from trioengine.worker.kernels.native_kernels import NativeKernels
    from trioengine.worker.runner.model_spec import choose_device, choose_dtype

    device = choose_device("auto")
    no_native_kernels: str | None = "they are for the CPU"
    if device.type == "cpu":
        try:
            NativeKernels(9, 3, 64, choose_dtype("auto", device), 16)  # for the default model
            no_native_kernels = None
        except KernelsUnavailable as exc:
            no_native_kernels = str(exc)
    found = {
        "torch": torch.__version__,
        "device": str(device),
        "dtype": str(choose_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": "native" if no_native_kernels is None else "torch",
        "no_native_kernels": no_native_kernels,
        "cuda": torch.version.cuda,
        "gpus": [
            {"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total}
            for index in range(torch.cuda.device_count())
            for free, total in [torch.cuda.mem_get_info(index)]
        ],
    }
    sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
