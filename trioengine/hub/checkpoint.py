"""The headers of a model's weights, read by the engine before a worker starts, and by the worker.

A checkpoint is a GGUF file, or a directory with config.json and model.safetensors, or shards with their index. Its
architecture is checked first, then its configuration, then the names and shapes of its tensors.
"""

from __future__ import annotations

import mmap
import pkgutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trioengine import hub
from trioengine.core.bounds import brief
from trioengine.core.errors import ModelError
from trioengine.core.gguf import MAX_TENSORS, GGUFTensor, parse_gguf
from trioengine.hub.llama_config import LlamaConfig
from trioengine.hub.model_config import Fields, ModelConfig, Shape, open_file, read_json
from trioengine.hub.safetensors import StoredTensor, read_header

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_IGNORED = ".rotary_emb.inv_freq"  # buffers that old checkpoints carry; they are computed


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The configuration of a directory, config.json's fields, and the tensors by name."""

    config: ModelConfig
    fields: Fields
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class GGUFModelHeader:
    """The configuration of a GGUF file, its metadata, and the tensors by their Hugging Face names."""

    config: LlamaConfig
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    interleaved_heads: dict[str, int]  # of each tensor in which dimensions i and i + head_dim / 2 lie side by side


def read_safetensors(directory: Path) -> SafetensorsHeader:
    """Read config.json and the headers of the weights. Raises ModelError, naming the file and the field or tensor."""
    fields = read_json(directory / _CONFIG, required=True)
    read_config = hf_architecture(fields)
    tensors = _tensors(directory)
    config = read_config(fields, len(tensors))
    check_tensors(directory, config, {name: tensor.shape for name, tensor in tensors.items()})
    return SafetensorsHeader(config, fields, tensors)


def map_file(path: Path) -> mmap.mmap:
    """The contents of a file, mapped. Raises ModelError."""
    try:
        with open_file(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None


def read_gguf(buffer: memoryview, path: Path, *, arrays: Container[str] = ()) -> GGUFModelHeader:
    """Read the header of the GGUF file in `buffer`, decoding these arrays. Raises ModelError as `parse_gguf` does."""
    header = parse_gguf(buffer, str(path), arrays=arrays)
    architecture = gguf_architecture(Fields(path, header.metadata))
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path}: split.count: a model split into several files is not supported: merge them first")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    config = architecture.config(header.metadata, shapes, path)
    tensors = _renamed(architecture, header.tensors, path)
    check_tensors(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    heads = {name: architecture.interleaved_heads(name, config) for name in tensors}
    interleaved = {name: count for name, count in heads.items() if count is not None}
    return GGUFModelHeader(config, header.metadata, tensors, interleaved)


def _renamed(architecture: GGUFArchitecture, tensors: tuple[GGUFTensor, ...], path: Path) -> dict[str, GGUFTensor]:
    renamed: dict[str, GGUFTensor] = {}
    for tensor in tensors:
        name = architecture.hf_name(tensor.name)
        if name in renamed:
            raise ModelError(f"{path}: tensors {brief(renamed[name].name)} and {brief(tensor.name)} are the same one")
        renamed[name] = tensor
    return renamed


def _tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of all files, without the buffers that are ignored."""
    index = read_json(directory / _INDEX)
    weight_map = _weight_map(directory, index)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())) or [_WEIGHTS]:
        for name, tensor in read_header(directory / file).items():
            if not name.endswith(_IGNORED):
                _check_tensor(name, tensor, tensors)
                tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors and not name.endswith(_IGNORED):
            raise ModelError(f"{index.path}: tensor {brief(name)} is not in {brief(file)}")
    return tensors


def _check_tensor(name: str, tensor: StoredTensor, others: dict[str, StoredTensor]) -> None:
    if tensor.dtype not in _DTYPES:
        supported = ", ".join(_DTYPES)
        raise ModelError(f"{tensor.file}: tensor {brief(name)} has the dtype {tensor.dtype}; supported: {supported}")
    if name in others:
        raise ModelError(f"{tensor.file}: tensor {brief(name)} is in {brief(others[name].file.name)}, too")
    if len(others) == MAX_TENSORS:
        raise ModelError(f"{tensor.file}: the model has more than {MAX_TENSORS} tensors")


def _weight_map(directory: Path, index: Fields) -> dict[str, str]:
    """The file of each tensor, by the index; empty without an index."""
    present = {file.name for file in directory.glob("*.safetensors")}
    if not index.path.exists():
        if _WEIGHTS not in present:
            raise ModelError(f"{directory}: the directory has no {_WEIGHTS}, and no {_INDEX}")
        return {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.bad("weight_map", "must be an object of file names")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise index.bad("weight_map", "must be an object of file names")
        if file not in present:
            raise index.bad("weight_map", f"names {brief(file)}, which is not there")
    return weight_map


_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file's metadata and tensors are read."""

    config: Callable[[Mapping[str, Any], Mapping[str, Shape], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # of a GGUF tensor
    interleaved_heads: Callable[[str, LlamaConfig], int | None]  # of a tensor, by its Hugging Face name


def _config_modules() -> Iterator[tuple[str, ModuleType]]:
    """The modules that read configurations, by model type, in alphabetical order.

    These are the modules of this package whose name ends with `_config`, and that declare MODEL_TYPES.
    """
    names = (found.name for found in pkgutil.iter_modules(hub.__path__, f"{hub.__name__}."))
    modules = [import_module(name) for name in names if name.endswith("_config")]
    yield from sorted((kind, module) for module in modules for kind in getattr(module, "MODEL_TYPES", ()))


# By config.json's fields, and the number of tensors.
HF_ARCHITECTURES: dict[str, Callable[[Fields, int], ModelConfig]] = {
    kind: module.config_from_hf for kind, module in _config_modules()
}
GGUF_ARCHITECTURES = {
    kind: GGUFArchitecture(module.config_from_gguf, module.hf_name, module.interleaved_heads)
    for kind, module in _config_modules()
    if hasattr(module, "config_from_gguf")
}


def hf_architecture(fields: Fields) -> Callable[[Fields, int], ModelConfig]:
    """The reader of a config.json. Raises ModelError, listing the supported ones, if there is none."""
    return HF_ARCHITECTURES[_supported(fields, "model_type", HF_ARCHITECTURES)]


def gguf_architecture(fields: Fields) -> GGUFArchitecture:
    """The readers of a GGUF file. Raises ModelError, listing the supported ones, if there are none."""
    return GGUF_ARCHITECTURES[_supported(fields, "general.architecture", GGUF_ARCHITECTURES)]


def check_tensors(path: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Raise ModelError unless these are all tensors that the model needs, and perhaps optional ones."""
    wanted = config.wanted_tensors()
    known = config.optional_tensors() | wanted
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"{path}: missing tensors: {_list(missing)}")
    if unexpected := [name for name in found if name not in known]:
        raise ModelError(f"{path}: unexpected tensors: {_list(unexpected)}")
    for name, shape in found.items():
        if shape != known[name]:
            raise ModelError(f"{path}: tensor {name} has the shape {brief(list(shape))}, not {list(known[name])}")


def _supported(fields: Fields, field: str, supported: Iterable[str]) -> str:
    name = fields.get(field)
    if isinstance(name, str) and name in supported:
        return name
    classes = fields.get("architectures")  # of transformers: all that a config.json without a model_type has
    named = f"{field} {brief(name)}" + (f" (architectures {brief(classes)})" if name is None and classes else "")
    raise ModelError(f"{fields.path}: {named} is not supported; supported: {', '.join(supported)}")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(brief, names[:_SHOWN])) + more
