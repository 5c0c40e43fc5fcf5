"""Compiles C++ for this machine and loads it; what was compiled is kept beside the models.

A library's name is the hash of whatever it depends on: the source, the command, and the compiler's own macros, which
tell its version and the instruction sets of this machine's CPU. It is renamed to that name as the last act, so a file
under it is whole, and any number of workers may compile at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.hub.home import trioengine_home

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wall")
_TIMEOUT = 60.0  # seconds; a cold start takes less than one
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
    name = f"{_hash(source, command)}.so"
    try:
        home = trioengine_home() / "kernels"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        library = home / name
        if not library.exists():
            _compile(source, command, library)
    except (ModelError, OSError):  # no home that can be written to: it is compiled at every start
        with tempfile.TemporaryDirectory(prefix="trioengine-") as directory:
            library = Path(directory) / name
            _compile(source, command, library)
            return _load(library)
    return _load(library)


def _hash(source: Path, command: Sequence[str]) -> str:
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    parts = (source.read_bytes(), repr(command).encode(), macros)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _compile(source: Path, command: Sequence[str], library: Path) -> None:
    """Linked without -fopenmp: its runtime is the one that torch has loaded, with the same threads."""
    with tempfile.TemporaryDirectory(prefix=_WORKPLACE, dir=library.parent) as workplace:
        made, linked = Path(workplace) / "kernels.o", Path(workplace) / library.name
        _run([*command, "-c", str(source), "-o", str(made)])
        _run([command[0], "-shared", str(made), "-o", str(linked)])
        linked.replace(library)


def _run(command: Sequence[str]) -> bytes:
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise KernelsUnavailable(f"the compiler does not run: {exc}") from exc
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else f"exit status {ended.returncode}")
        raise KernelsUnavailable(f"{command[0]} fails: {why}")
    return ended.stdout


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as exc:  # another OpenMP than GCC's; a home on a disk from which nothing may be run
        raise KernelsUnavailable(f"what was compiled cannot be loaded: {exc}") from exc
