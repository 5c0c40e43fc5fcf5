"""Python, the packages, and what torch makes of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trioengine
from trioengine import __version__
from trioengine.cli.doctor.part import Part, Problem, fatal, warning
from trioengine.core.child_environment import child_environment
from trioengine.worker.__main__ import MARK

PACKAGES = ("trio", "trio-websocket", "h11", "msgpack", "tokenizers", "jinja2", "gguf", "safetensors", "numpy", "torch")
PROBE = (sys.executable, "-P", "-m", "trioengine.worker", "--probe")
PROBE_TIMEOUT = 300.0  # seconds; a cold disk takes long over torch
_INSTALL_TORCH = "pip install 'torch>=2.11,<2.14' (on a machine without a GPU, its CPU build first)"


def versions() -> Part:
    """Of Python and of what trioengine needs."""
    found = {package: _version(package) for package in PACKAGES}
    problems = [
        fatal(f"the package {package} is not installed", f"pip install {package}, or trioengine anew")
        for package, version in found.items()
        if version is None and package != "torch"  # of which the probe says more
    ]
    return Part(
        {
            "trioengine": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            **found,
        },
        (*_system_problems(), *problems),
    )


def _system_problems() -> list[Problem]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
    except (AttributeError, OSError) as exc:
        return [
            fatal(f"the kernel lacks pidfd or memfd ({exc})", "run on Linux 5.4 or newer, and let seccomp pass them")
        ]
    return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def worker(command: Sequence[str] = PROBE) -> Part:
    """What a worker would run on; blocks for some seconds, while torch is imported."""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Part(problems=(fatal(f"importing torch takes longer than {PROBE_TIMEOUT:g} s", "look at the disk"),))
    facts = _found(ended.stdout.decode("utf-8", "replace"))
    if ended.returncode == 0 and facts is not None:
        return Part(facts, tuple(_kernel_problems(facts)))
    complaint = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    why = complaint[-1] if complaint else f"exit status {ended.returncode}"
    if ended.returncode < 0:
        why = f"killed by signal {-ended.returncode}"
    return Part(problems=(fatal(f"a worker cannot start: {why}", _INSTALL_TORCH),))


def _kernel_problems(facts: dict[str, Any]) -> Iterator[Problem]:
    if facts["device"] == "cpu" and facts["kernels"] != "native":
        what = f"torch's kernels are used, which take longer: {facts['no_native_kernels']}"
        yield warning(what, "install a working g++ (Debian: apt install g++)")


def _environment() -> dict[str, str]:
    """Ours, in which another Python finds this trioengine, too. (What the engine uses imports what may be missing.)"""
    package = str(Path(trioengine.__file__).resolve().parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return child_environment(os.environ) | {"PYTHONPATH": path}


def _found(output: str) -> dict[str, Any] | None:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix(MARK)) if lines else None
    return found
