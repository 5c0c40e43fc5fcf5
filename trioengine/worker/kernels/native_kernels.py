"""The native kernels: calls into the library that is compiled from native.cpp.

It is compiled once for a model's shape, a compiler and a machine, and kept in the user's folder under a hash of all
three: the source with its headers, the command with the shape as macros, and the macros that the compiler itself
defines, which name its version and the machine's instructions. A kept library that others than the user and root can
have changed is not loaded: the source is compiled again, in a private folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trioengine.core.config import child_environment
from trioengine.core.errors import InvariantError, ModelError
from trioengine.hub.known_models import trioengine_home
from trioengine.worker.kernels import Attention, RMSNorm, RotaryTable
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache

logger = logging.getLogger("trioengine")
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wall")
_TIMEOUT = 30.0  # seconds: one is needed, and a start may take longer without progress
_WORKPLACE = ".compile-"  # + a random suffix
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_TILE_BYTES = 72 << 10  # of queries, scores and results, in float32
_KEYS, _LANES = 64, 16  # as in native.cpp
_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "add_norm": (_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _COUNT, _COUNT, _ADDRESS),
    "rotate": (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "silu_and_multiply": (_ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "store": (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "attend": (_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _FLOAT, _ADDRESS),
}


class KernelsUnavailable(Exception):
    """The native kernels cannot be had; the message is a reason for the user."""


class CompilerMissing(KernelsUnavailable):
    """The machine has no C++ compiler."""


class NativeKernels:
    """The calls into native.cpp, during which other threads run."""

    name = "native"
    is_batch_invariant = True  # each row by the same operations, in the order of its columns and its context

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> None:
        """Load the library, compiled now if it never was before. Raises KernelsUnavailable, with the reason."""
        self.group_size = num_heads // num_kv_heads
        row_bytes = 4 * (2 * -(-head_dim // _LANES) * _LANES + _KEYS)
        self.tile_size = max(1, _TILE_BYTES // (row_bytes * self.group_size))  # tokens
        self.dtype = dtype
        macros: dict[str, str | int] = {
            "ELEMENT": _ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "GROUP_SIZE": self.group_size,
            "TILE_SIZE": self.tile_size,
            "BLOCK_SIZE": block_size,
        }
        self.native = load_library(_SOURCE, macros, tuple(_ARGUMENTS))
        for name, types in _ARGUMENTS.items():
            function = getattr(self.native, name)
            function.argtypes, function.restype = types, None

    def add_norm(self, hidden: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
        rows, size = hidden.shape
        result = torch.empty_like(delta)
        addresses = (_address(hidden, torch.float32), _address(delta, self.dtype), _address(norm.weight, torch.float32))
        self.native.add_norm(*addresses, norm.epsilon, rows, size, result.data_ptr())
        return result

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        tokens, all_heads, _ = heads.shape
        table = _address(rotary.table, self.dtype)
        self.native.rotate(
            _address(heads, self.dtype), tokens, all_heads, count, table, _address(positions, torch.int64)
        )

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape
        result = gate_up.new_empty((rows, size // 2))
        self.native.silu_and_multiply(_address(gate_up, self.dtype), rows, size // 2, result.data_ptr())
        return result

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        return _NativeAttention(self, batch, cache)


class _NativeAttention:
    """One step's attention: keys and values are read in place, a tile of queries at a time."""

    def __init__(self, kernels: NativeKernels, batch: ForwardBatch, cache: KVCache) -> None:
        self._kernels, self._cache = kernels, cache
        self._slots = batch.slot_mapping
        self._tables = torch.from_numpy(batch.block_tables)
        self._tiles = _tiles(batch, kernels.tile_size)

    def forward(self, layer: int, heads: Tensor) -> Tensor:
        kernels, kv_heads = self._kernels, self._cache.num_kv_heads
        tokens, _, head_dim = heads.shape
        result = heads.new_empty((tokens, kernels.group_size * kv_heads * head_dim))
        at, cache = _address(heads, kernels.dtype), _address(self._cache.layers[layer], kernels.dtype)
        kernels.native.store(at, tokens, kv_heads, self._slots.data_ptr(), cache)
        kernels.native.attend(
            at,
            kv_heads,
            cache,
            self._tables.data_ptr(),
            self._tables.shape[1],
            self._tiles.data_ptr(),
            len(self._tiles),
            head_dim**-0.5,
            result.data_ptr(),
        )
        return result


def _tiles(batch: ForwardBatch, size: int) -> Tensor:
    """Pieces of at most `size` new tokens of a sequence, as native.cpp's Tile: [num_tiles, 4], int64."""
    counts = -(-batch.query_lens // size)  # tiles of each sequence
    sequences = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    new = batch.query_lens[sequences]
    tokens = np.minimum(size, new - offsets)
    rows = (np.cumsum(batch.query_lens) - batch.query_lens)[sequences] + offsets
    contexts = batch.context_lens[sequences] - new + offsets + tokens
    return torch.from_numpy(np.stack((sequences, rows, tokens, contexts), axis=1))


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address, once dtype and layout are checked: C++ would read garbage from any other tensor."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvariantError(f"a native kernel got {tensor.dtype} in strides {tensor.stride()}, not {dtype} in a row")
    return tensor.data_ptr()


def find_compiler() -> str | None:
    """Find GCC's compiler: with its OpenMP runtime the kernels share torch's threads."""
    return shutil.which("g++")


def load_library(source: Path, macros: Mapping[str, str | int], functions: Sequence[str] = ()) -> ctypes.CDLL:
    """The source as a library with these functions, compiled with these macros unless a kept one can be trusted.

    Raises KernelsUnavailable if it can be neither loaded nor compiled.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing("no C++ compiler found; install g++")
    command = [compiler, *_FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    try:
        kept = _home() / f"{_hash(source, command)}.so"
        library = _load_kept(kept)
        if library is not None and _missing(library, functions) is None:
            return library
        logger.info("compiling the CPU kernels for this model and machine")
        with _private_folder() as folder:
            made = folder / kept.name
            _compile(source.absolute(), command, made)
            _keep(made, kept)
            library = _load(made, kept)
    except OSError as exc:
        raise KernelsUnavailable(f"nothing can be compiled: {exc}") from exc
    if (function := _missing(library, functions)) is not None:
        raise KernelsUnavailable(f"the compiled library lacks the function {function}")
    return library


def _hash(source: Path, command: Sequence[str]) -> str:
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    headers = (header.read_bytes() for header in sorted(source.parent.glob("*.h")))
    parts = (source.read_bytes(), *headers, repr(command).encode(), macros)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _run(command: Sequence[str], folder: Path | None = None) -> bytes:
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            cwd=folder,
            env=child_environment(os.environ) | {"LC_ALL": "C"},
            check=False,
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


def _home() -> Path:
    try:
        return trioengine_home() / "kernels"
    except ModelError:  # the user has none
        return Path(os.devnull)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A new folder with mode 0700, removed at the end; the path goes through a descriptor.

    So it stays the same folder where others can rename it, as below a folder for temporary files without a sticky bit.
    """
    with tempfile.TemporaryDirectory(prefix="trioengine-") as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
                raise PermissionError(f"{name} was replaced")
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


def _compile(source: Path, command: Sequence[str], made: Path) -> None:
    """Linked without -fopenmp: its runtime is the one that torch has loaded, with the same threads."""
    _run([*command, "-c", str(source), "-o", "kernels.o"], made.parent)
    _run([command[0], "-shared", "kernels.o", "-o", made.name], made.parent)


def _keep(made: Path, kept: Path) -> None:
    """Also in place of a file that is damaged or not trusted; nothing is kept in a folder that others can change."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(kept.parent):
            return
        with tempfile.TemporaryDirectory(prefix=_WORKPLACE, dir=kept.parent) as workplace:
            copy = Path(workplace) / kept.name
            with copy.open("wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())  # a crash of the machine leaves the whole file under the name, or none
            copy.replace(kept)


def _load(made: Path, kept: Path) -> ctypes.CDLL:
    """From the private folder, or where nothing may be run from that disk, as it was kept."""
    try:
        return ctypes.CDLL(str(made))
    except OSError as exc:  # as where torch has another OpenMP than GCC's
        if (library := _load_kept(kept)) is not None:
            return library
        raise KernelsUnavailable(f"the compiled library cannot be loaded: {exc}") from exc


def _load_kept(library: Path) -> ctypes.CDLL | None:
    """None: absent, damaged, on a disk from which nothing may be run, or others can have changed it."""
    try:
        place = library.resolve(strict=True)
        return ctypes.CDLL(str(place)) if _is_ours(place) else None
    except OSError:
        return None


def _missing(library: ctypes.CDLL, functions: Sequence[str]) -> str | None:
    return next((name for name in functions if not hasattr(library, name)), None)


def _is_ours(path: Path) -> bool:
    """Whether only this user and root can change a file or folder, or put another one in its place.

    `path` has no symbolic links. A folder above it may be writable by all where its sticky bit protects the entries.
    """
    return all(_only_we_change(place, is_above=place != path) for place in (path, *path.parents))


def _only_we_change(place: Path, *, is_above: bool) -> bool:
    found = place.lstat()
    is_open = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    is_sticky = is_above and bool(found.st_mode & stat.S_ISVTX)
    return found.st_uid in (0, os.geteuid()) and (is_sticky or not is_open)
