"""The report of a process that imports torch, which this process does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trioengine
from trioengine.core.config import child_environment
from trioengine.worker.__main__ import MARK

WORKER = (sys.executable, "-P", "-m", "trioengine.worker")


class ReportFailed(Exception):
    """The process has ended without a report; the message is the reason."""


def worker_report(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run the command, and return its report; blocks until it ends.

    Raises ReportFailed, and subprocess.TimeoutExpired after so many seconds.
    """
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=_environment(), check=False
    )
    lines = [line for line in ended.stdout.decode("utf-8", "replace").splitlines() if line.startswith(MARK)]
    if ended.returncode == 0 and lines:
        report: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return report
    if ended.returncode < 0:
        raise ReportFailed(f"killed by signal {-ended.returncode}")
    stderr = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    raise ReportFailed(stderr[-1] if stderr else f"exit status {ended.returncode}")


def _environment() -> dict[str, str]:
    """Our environment, without keys, in which a process finds this trioengine package."""
    package = str(Path(trioengine.__file__).resolve().parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return child_environment(os.environ) | {"PYTHONPATH": path}
