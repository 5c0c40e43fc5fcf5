"""Compiles C++ for this machine and loads it; what was compiled is kept beside the models.

A library's name is the hash of whatever it depends on: the source, the command, and the compiler's own macros, which
tell its version and the instruction sets of this machine's CPU. It is renamed to that name as the last act, so a file
under it is whole, and any number of workers may compile at once. Where there is no such place, or nothing can be loaded
from it, it is compiled at every start.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.hub.home import trioengine_home

logger = logging.getLogger("trioengine")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wall")
_TIMEOUT = 30.0  # seconds, of which one is needed; all of it is less than what a start may take without progress
_WORKPLACE = ".compile-"  # + a random suffix


class KernelsUnavailable(Exception):
    """Why there are none; says it to the user."""


class CompilerMissing(KernelsUnavailable):
    """There is none on the machine."""


def find_compiler() -> str | None:
    """GCC's, because OpenMP's threads must be those of torch, which has GCC's runtime."""
    return shutil.which("g++")


def load_library(source: Path, macros: Mapping[str, str | int]) -> ctypes.CDLL:
    """The source as a library, compiled with these macros if it never was; KernelsUnavailable: it cannot be."""
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing("there is no C++ compiler; install g++")
    command = [compiler, *_FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    try:
        kept = _home() / f"{_hash(source, command)}.so"
        if (library := _loaded(kept)) is not None:
            return library
        logger.info("compiling the CPU kernels for this model and machine")
        with tempfile.TemporaryDirectory(prefix="trioengine-") as workplace:
            made = _compile(source, command, Path(workplace))
            _keep(made, kept)
            return _loaded(kept) or _load(made)
    except OSError as exc:
        raise KernelsUnavailable(f"nothing can be compiled: {exc}") from exc


def _home() -> Path:
    try:
        return trioengine_home() / "kernels"
    except ModelError:  # the user has none
        return Path(os.devnull)


def _hash(source: Path, command: Sequence[str]) -> str:
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    parts = (source.read_bytes(), repr(command).encode(), macros)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _compile(source: Path, command: Sequence[str], workplace: Path) -> Path:
    """Linked without -fopenmp: its runtime is the one that torch has loaded, with the same threads."""
    made, linked = workplace / "kernels.o", workplace / "kernels.so"
    _run([*command, "-c", str(source), "-o", str(made)])
    _run([command[0], "-shared", str(made), "-o", str(linked)])
    return linked


def _keep(made: Path, kept: Path) -> None:
    """Also in place of a file that is damaged; nothing is kept where that cannot be."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_WORKPLACE, dir=kept.parent) as workplace:
            copy = Path(workplace) / kept.name
            with copy.open("wb") as file:
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())  # a crash of the machine leaves the whole file under the name, or none
            copy.replace(kept)


def _run(command: Sequence[str]) -> bytes:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, env=environment, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise KernelsUnavailable(f"{command[0]} takes longer than {_TIMEOUT:g} s") from exc
    except OSError as exc:
        raise KernelsUnavailable(f"{command[0]} does not run: {exc}") from exc
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else f"exit status {ended.returncode}")
        raise KernelsUnavailable(f"{command[0]} fails: {why}")
    return ended.stdout


def _loaded(library: Path) -> ctypes.CDLL | None:
    """None: there is none, or a damaged one, or it lies on a disk from which nothing may be run."""
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        return None


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as exc:  # as where torch has another OpenMP than GCC's
        raise KernelsUnavailable(f"what was compiled cannot be loaded: {exc}") from exc
