"""`trioengine bench roof`: the peaks of this CPU, measured in a process of its own."""

from __future__ import annotations

import json
import sys

from trioengine.cli.worker_report import WORKER, ReportFailed, worker_report

_START = 300.0  # seconds, to import torch and to compile
_PEAKS = 4
_ROWS = {
    "threads": "threads",
    "memory_gb_s": "GB/s of memory that is read, in huge pages",
    "int8_gop_s": "10^9 operations/s of 8-bit integers, in registers",
    "float32_gop_s": "10^9 operations/s of float32, in registers",
    "bfloat16_gop_s": "10^9 operations/s of bfloat16, in registers",
}


def bench_roof(seconds: float, num_threads: int | None, *, as_json: bool) -> int:
    """Measure and print; returns the exit code."""
    threads = [] if num_threads is None else [str(num_threads)]
    try:
        report = worker_report((*WORKER, "--roof", str(seconds), *threads), _START + _PEAKS * seconds)
    except ReportFailed as exc:
        print(f"the roof cannot be measured: {exc}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report))
    else:
        print("\n".join(f"{name:16} {report[name]:8.0f} {unit}" for name, unit in _ROWS.items()))
    return 0
