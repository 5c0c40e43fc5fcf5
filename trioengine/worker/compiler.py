"""Libraries compiled from C++ on this machine.

A library is compiled once for its macros, such as a model's shape, for a compiler and a machine, and kept in the user's
folder under a hash of all of them: the sources with their headers, the command with the macros, and the macros that the
compiler itself defines, which name its version and the machine's instructions. A kept library that others than the user
and root can have changed is not loaded: the sources are compiled again, side by side, in a private folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from trioengine.core.config import child_environment
from trioengine.core.errors import ModelError
from trioengine.hub.known_models import trioengine_home

logger = logging.getLogger("trioengine")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-falign-functions=64",  # else the speed of a loop depends on the functions before it, by some 3 %
    "-march=native",
    "--param=avoid-fma-max-bits=0",  # else GCC fuses products and sums in some loops, for AMD
    "-fopenmp",
    "-fPIC",
)
_TIMEOUT = 55.0  # seconds: some are needed; a start may take longer than two of them without progress
_WORKPLACE = ".compile-"  # + a random suffix


class KernelsUnavailable(Exception):
    """These kernels cannot be had; the message is a reason for the user."""


class CompilerMissing(KernelsUnavailable):
    """The machine has no C++ compiler."""


_compiling = threading.Lock()
_failures: dict[tuple[Path | str, ...], KernelsUnavailable] = {}  # of `compile_library`, by sources and command
_running: set[subprocess.Popen[bytes]] = set()


def find_compiler() -> str | None:
    """Find GCC's compiler: with its OpenMP runtime the kernels share torch's threads."""
    return shutil.which("g++")


def load_library(
    sources: Sequence[Path], macros: Mapping[str, str | int], functions: Sequence[str] = ()
) -> ctypes.CDLL:
    """Load the sources, of one folder, as a library with these functions.

    It is compiled with these macros unless a kept one can be trusted. Raises KernelsUnavailable if it can be neither
    loaded nor compiled.
    """
    command = _command(macros)
    with _compiling, _describing_errors():
        if (failure := _failures.pop((*sources, *command), None)) is not None:
            raise failure
        kept = _place(sources, command)
        library = _load_kept(kept)
        if library is not None and _missing(library, functions) is None:
            return library
        with _compiled(sources, command, kept) as made:
            library = _load(made, kept)
    if (function := _missing(library, functions)) is not None:
        raise KernelsUnavailable(f"the compiled library lacks the function {function}")
    return library


def compile_library(sources: Sequence[Path], macros: Mapping[str, str | int]) -> None:
    """Compile a library that is not kept yet, unless none can be kept. `load_library` waits for this in another thread.

    The library is not loaded: it is linked to the OpenMP that torch loads. Raises KernelsUnavailable, and so does the
    next `load_library` of this library.
    """
    command = _command(macros)
    with _compiling:
        try:
            with _describing_errors():
                kept = _place(sources, command)
                if not kept.exists() and _can_keep_in(kept.parent):
                    with _compiled(sources, command, kept):
                        pass
        except KernelsUnavailable as exc:
            _failures[*sources, *command] = exc
            raise


def end_compilers() -> None:
    """Kill the compilers that run: `load_library` and `compile_library` raise KernelsUnavailable in their threads."""
    for process in list(_running):
        _end(process)


def _command(macros: Mapping[str, str | int]) -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing("no C++ compiler found; install g++")
    return [compiler, *_FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]


@contextlib.contextmanager
def _describing_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise KernelsUnavailable(f"nothing can be compiled: {exc}") from exc


def _place(sources: Sequence[Path], command: Sequence[str]) -> Path:
    """Return the place where the library is kept, or will be."""
    return _home() / f"{_hash(sources, command)}.so"


@contextlib.contextmanager
def _compiled(sources: Sequence[Path], command: Sequence[str], kept: Path) -> Iterator[Path]:
    """Compile a library and keep it where that is possible; within the block it also is in a private folder."""
    logger.info("compiling the CPU kernels for this model and machine")
    with _private_folder() as folder:
        made = folder / kept.name
        _compile([source.absolute() for source in sources], command, made)
        _keep(made, kept)
        yield made


def _hash(sources: Sequence[Path], command: Sequence[str]) -> str:
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    files = (file.read_bytes() for file in (*sources, *sorted(sources[0].parent.glob("*.h"))))
    parts = (*files, repr(command).encode(), *macros)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _run(*commands: Sequence[str], folder: Path | None = None) -> list[bytes]:
    """Run compilers side by side; return their output. When one fails or takes too long, all are ended."""
    with ThreadPoolExecutor(len(commands)) as threads, contextlib.ExitStack() as running:
        outputs = []
        for command in commands:
            process = _start(command, folder)
            _running.add(process)
            running.callback(_running.discard, process)
            running.callback(_end, process)
            outputs.append(threads.submit(_wait, process, command[0]))
        for output in as_completed(outputs):
            output.result()
    return [output.result() for output in outputs]


def _start(command: Sequence[str], folder: Path | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=child_environment(os.environ) | {"LC_ALL": "C"},
        )
    except OSError as exc:
        raise KernelsUnavailable(f"{command[0]} does not run: {exc}") from exc


def _wait(process: subprocess.Popen[bytes], name: str) -> bytes:
    with process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as exc:
            _end(process)
            raise KernelsUnavailable(f"{name} takes longer than {_TIMEOUT:g} s") from exc
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        last = said[-1] if said else f"exit status {process.returncode}"
        why = next((line for line in said if "error" in line), last)
        raise KernelsUnavailable(f"{name} fails: {why}")
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiler that still runs, and its child, which does the work. They have no group of their own: they are in
    this process's, to end with it.
    """
    if process.returncode is None:
        with contextlib.suppress(OSError):  # it has just ended
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("ascii").split():
                os.kill(int(child), signal.SIGKILL)
        process.kill()


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


def _compile(sources: Sequence[Path], command: Sequence[str], made: Path) -> None:
    """Linked without -fopenmp: its runtime is the one that torch has loaded, with the same threads."""
    objects = {f"{source.stem}.o": str(source) for source in sources}
    _run(*([*command, "-c", source, "-o", name] for name, source in objects.items()), folder=made.parent)
    _run([command[0], "-shared", *objects, "-o", made.name], folder=made.parent)


def _keep(made: Path, kept: Path) -> None:
    """Also in place of a file that is damaged or not trusted; nothing is kept in a folder that others can change."""
    with contextlib.suppress(OSError):
        if not _can_keep_in(kept.parent):
            return
        with tempfile.TemporaryDirectory(prefix=_WORKPLACE, dir=kept.parent) as workplace:
            copy = Path(workplace) / kept.name
            with copy.open("wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())  # a crash of the machine leaves the whole file under the name, or none
            copy.replace(kept)


def _can_keep_in(folder: Path) -> bool:
    """Make the folder of kept libraries if it is absent. False where others can change it, or this user cannot."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _is_ours(folder) and os.access(folder, os.W_OK)
    except OSError:
        return False


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
