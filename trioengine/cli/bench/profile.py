"""`trioengine bench offline --profile`: where the time of steps goes, measured in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trioengine.cli.progress import progress_bars
from trioengine.cli.worker_report import WORKER, ReportFailed, worker_report
from trioengine.core.config import EngineConfig
from trioengine.hub.pull import resolve

_TIMEOUT = 3600.0  # seconds
_HEADER = ("part", "s", "share", "10^9 op/s", "GB/s", "of the roof")


def bench_profile(config: EngineConfig, requests: int, prompt_len: int, output_len: int, *, as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises ModelError if the model cannot be found."""
    with progress_bars() as bars:
        worker = config.for_worker(str(resolve(config.model, bars.download)))
    work = (json.dumps(asdict(worker)), *map(str, (requests, prompt_len, output_len)))
    try:
        report = worker_report((*WORKER, "--profile", *work), _TIMEOUT)
    except ReportFailed as exc:
        print(f"the profile cannot be made: {exc}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report))
        return 0
    roof = report["roof"]
    print("{steps} steps, {tokens} tokens, {seconds:.3f} s; {dtype}, quantization {quantization}".format_map(report))
    floats = roof[f"{report['dtype']}_gop_s"]
    for name, *figures in (_HEADER, *_rows(report["parts"], roof, floats)):
        print(f"{name:14}" + "".join(f"{figure:>12}" for figure in figures))
    peaks = "the roof: {memory_gb_s:.0f} GB/s, 10^9 op/s of int8 {int8_gop_s:.0f}, of".format_map(roof)
    print(f"{peaks} {report['dtype']} {floats:.0f}")
    return 0


def _rows(
    parts: Mapping[str, Mapping[str, Any]], roof: Mapping[str, float], floats_gop_s: float
) -> list[tuple[str, ...]]:
    """A row for each part, the longest first. Of the roof's shares, of memory and of operations, the larger one.

    `floats_gop_s`: the peak of operations of the dtype.
    """
    total = sum(part["seconds"] for part in parts.values())
    rows = []
    for name, part in sorted(parts.items(), key=lambda item: -item[1]["seconds"]):
        seconds = part["seconds"]
        row = [name, f"{seconds:.3f}", f"{seconds / total:.1%}"]
        if part["weight_bytes"] and seconds > 0:
            integers, floats, read = (
                part[key] / seconds / 1e9 for key in ("integer_operations", "float_operations", "weight_bytes")
            )
            share = max(integers / roof["int8_gop_s"] + floats / floats_gop_s, read / roof["memory_gb_s"])
            row += [f"{integers + floats:.1f}", f"{read:.1f}", f"{share:.0%}"]
        rows.append(tuple(row))
    return rows
