"""How an embedding model makes one vector of a text: read from sentence-transformers' files or a GGUF file's metadata.

The only supported way is the hidden state of the last token, behind the last norm, of a causal model.

Formats: modules.json and its Pooling module (https://sbert.net/docs/package_reference/sentence_transformer/models.html),
and llama.cpp's `pooling_type` (enum llama_pooling_type in include/llama.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub.llama_config import gguf_fields
from trioengine.hub.model_config import Fields, read_json, read_objects

_MODULES, _POOLING = "modules.json", "1_Pooling"
_KINDS = ("Transformer", "Pooling", "Normalize")  # of modules, in their order; vectors are normalized in any case
_MODE, _LAST = "pooling_mode", "lasttoken"  # older files have a flag for each mode
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


def pools_directory(directory: Path, config: Fields) -> bool:
    """Return whether the directory is an embedding model; `config` are the fields of its config.json.

    Raises ModelError for any pooling other than last-token pooling.
    """
    folder = _pooling_folder(directory)
    if folder is None:
        return False
    fields = read_json(folder / "config.json", required=True)
    flags = [name for name in fields.names() if name.startswith(f"{_MODE}_") and fields.flag(name)]
    mode = fields.get(_MODE) or ", ".join(flags)
    if mode not in (_LAST, f"{_MODE}_{_LAST}"):
        raise ModelError(f"{fields.path}: the pooling {brief(mode)} is not supported; supported: {_LAST}")
    if not config.flag("is_causal", True):
        raise config.bad("is_causal", "must be true")
    return True


def pools_gguf(metadata: Mapping[str, Any], path: Path, architecture: str) -> bool:
    """Return whether a GGUF file is an embedding model. Raises ModelError as `pools_directory` does."""
    fields = gguf_fields(metadata, path, architecture)
    pooling = fields.index("pooling_type", 0)
    if pooling == 0:
        return False
    if _GGUF_TYPES.get(pooling) != "last":
        name = f"{pooling} ({_GGUF_TYPES.get(pooling, 'unknown')})"
        raise ModelError(f"{path}: {architecture}.pooling_type {name} is not supported; supported: 3 (last)")
    if not fields.flag("attention.causal", True):
        raise fields.bad("attention.causal", "must be true")
    return True


def _pooling_folder(directory: Path) -> Path | None:
    """Return the folder of the Pooling module; None if the directory has no files of sentence-transformers."""
    path = directory / _MODULES
    if not path.exists():
        folder = directory / _POOLING
        return folder if folder.is_dir() else None
    modules = read_objects(path)
    kinds = tuple(module.string("type").rpartition(".")[2] for module in modules)
    if kinds not in (_KINDS, _KINDS[:-1]):
        known = ", ".join(_KINDS)
        raise ModelError(f"{path}: the modules {brief(', '.join(kinds))} are not supported; supported: {known}")
    name = modules[1].string("path")
    if modules[0].string("path") or not name or Path(name).name != name or name == "..":
        raise ModelError(f"{path}: the model must lie beside the file, and its pooling in a folder of its own")
    return directory / name
