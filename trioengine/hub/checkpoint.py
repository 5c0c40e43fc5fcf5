"""The headers of a model's weights, read by the engine before a worker starts, and by the worker.

A checkpoint is a GGUF file, or a directory with config.json and model.safetensors, or with shards and their index. Its
architecture is checked first, then its configuration, then the names and shapes of its tensors.

Another architecture is one more file of this package: a module whose name ends with `_config` and that declares
MODEL_TYPES reads the files of these types. It defines
* `config_from_hf(fields, num_tensors)`;
* for GGUF files `config_from_gguf(metadata, shapes, path)` and `hf_name(tensor)`;
* for GGUF files of some architectures GGUF_TYPES, their names where these differ from MODEL_TYPES,
  `stored_rows(tensor, config)`, `stored_columns(tensor, config)`, and `stored_form(tensor)`.
"""

from __future__ import annotations

import math
import mmap
import pkgutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from trioengine import hub
from trioengine.core.errors import ModelError
from trioengine.core.gguf import parse_gguf
from trioengine.core.wording import brief
from trioengine.hub.gguf_tensors import PlacedTensor, StoredForm, in_hf_shapes, place_tensors
from trioengine.hub.llama_config import LlamaConfig
from trioengine.hub.model_config import MAX_MODEL_TENSORS, Fields, ModelConfig, Rows, Shape, open_file, read_json
from trioengine.hub.pooling import pools_directory, pools_gguf
from trioengine.hub.safetensors import StoredTensor, read_header

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_IGNORED = ".rotary_emb.inv_freq"  # computed buffers, which old checkpoints contain
_PREFIX, _HEAD = "model.", "lm_head.weight"
_SHOWN = 5  # names in an error message
TensorT = TypeVar("TensorT", StoredTensor, PlacedTensor)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The configuration of a directory, the fields of its config.json, and its tensors by name."""

    config: ModelConfig
    fields: Fields
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class GGUFModelHeader:
    """The configuration of a GGUF file, its metadata, and its tensors by their Hugging Face names."""

    config: LlamaConfig
    metadata: dict[str, Any]
    tensors: dict[str, PlacedTensor]


def read_safetensors(directory: Path) -> SafetensorsHeader:
    """Read config.json and the headers of the weights. Raises ModelError, naming the file and the field or tensor."""
    fields = read_json(directory / _CONFIG, required=True)
    config_from_hf = HF_ARCHITECTURES[_supported(fields, "model_type", HF_ARCHITECTURES)]
    tensors = _tensors(directory)
    config = config_from_hf(fields, len(tensors))
    if pools_directory(directory, fields):
        config, tensors = _embedding_config(config, directory), _with_prefix(tensors)
    tensors = _parted(directory, config, tensors)
    _check_tensors(directory, config, {name: tensor.shape for name, tensor in tensors.items()})
    return SafetensorsHeader(config, fields, tensors)


def read_gguf(buffer: memoryview, path: Path, *, arrays: Container[str] = ()) -> GGUFModelHeader:
    """Read the header of the GGUF file in `buffer`, decoding these arrays. Raises ModelError as `parse_gguf` does."""
    header = parse_gguf(buffer, str(path), arrays=arrays)
    fields = Fields(path, header.metadata)
    architecture = GGUF_ARCHITECTURES[_supported(fields, "general.architecture", GGUF_ARCHITECTURES)]
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path}: split.count: a model split into several files is not supported: merge them first")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    config = architecture.config(header.metadata, shapes, path)
    if pools_gguf(header.metadata, path, header.metadata["general.architecture"]):
        config = _embedding_config(config, path)
    placed = _parted(path, config, place_tensors(architecture.hf_name, header.tensors, path))
    tensors = in_hf_shapes(placed, config.wanted_tensors())
    _check_tensors(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    changed = {name: architecture.changed(name, tensor, config) for name, tensor in tensors.items()}
    return GGUFModelHeader(config, header.metadata, changed)


def _embedding_config(config: ModelConfig, path: Path) -> LlamaConfig:
    """Return the configuration of an embedding model of this architecture. Raises ModelError for one with images."""
    if not isinstance(config, LlamaConfig):
        raise ModelError(f"{path}: embedding models of the model_type {config.model_type} are not supported")
    return replace(config, embeds=True, tie_word_embeddings=True)


def _with_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of an embedding model under the names of a model with a head, if they lack its prefix."""
    if any(name.startswith(_PREFIX) for name in tensors):
        return tensors
    return {name if name == _HEAD else _PREFIX + name: tensor for name, tensor in tensors.items()}


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading. Raises ModelError."""
    try:
        with open_file(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None


# ---- architectures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file's metadata and tensors are read."""

    config: Callable[[Mapping[str, Any], Mapping[str, Shape], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # the Hugging Face name of a GGUF tensor
    # Of a tensor, by its Hugging Face name: its rows, its columns and its form in the file.
    stored_rows: Callable[[str, LlamaConfig], Rows | None]
    stored_columns: Callable[[str, LlamaConfig], Rows | None]
    stored_form: Callable[[str], StoredForm]

    def changed(self, name: str, tensor: PlacedTensor, config: LlamaConfig) -> PlacedTensor:
        """Return the tensor with the changes of llama.cpp's conversion."""
        rows = self.stored_rows(name, config) or tensor.rows
        return replace(tensor, rows=rows, columns=self.stored_columns(name, config), form=self.stored_form(name))


def _config_modules() -> list[ModuleType]:
    """Return the modules that read configurations."""
    names = (found.name for found in pkgutil.iter_modules(hub.__path__, f"{hub.__name__}."))
    modules = [import_module(name) for name in names if name.endswith("_config")]
    return [module for module in modules if hasattr(module, "MODEL_TYPES")]


def _hf_architectures() -> Iterator[tuple[str, Callable[[Fields, int], ModelConfig]]]:
    for module in _config_modules():
        for kind in module.MODEL_TYPES:
            yield kind, module.config_from_hf


def _gguf_architectures() -> Iterator[tuple[str, GGUFArchitecture]]:
    for module in _config_modules():
        if hasattr(module, "config_from_gguf"):
            rows = getattr(module, "stored_rows", lambda name, config: None)
            columns = getattr(module, "stored_columns", lambda name, config: None)
            form = getattr(module, "stored_form", lambda name: StoredForm.SAME)
            architecture = GGUFArchitecture(module.config_from_gguf, module.hf_name, rows, columns, form)
            for kind in getattr(module, "GGUF_TYPES", module.MODEL_TYPES):
                yield kind, architecture


# By the `model_type` of config.json; called with its fields and the number of tensors.
HF_ARCHITECTURES: dict[str, Callable[[Fields, int], ModelConfig]] = dict(sorted(_hf_architectures(), key=itemgetter(0)))
# By the `general.architecture` of a GGUF file.
GGUF_ARCHITECTURES = dict(sorted(_gguf_architectures(), key=itemgetter(0)))


def _supported(fields: Fields, field: str, supported: Iterable[str]) -> str:
    """Return the field's value. Raises ModelError, listing the supported values, for another one."""
    name = fields.get(field)
    if isinstance(name, str) and name in supported:
        return name
    classes = fields.get("architectures")  # classes of transformers; old config.json files have no model_type
    named = f"{field} {brief(name)}" + (f" (architectures {brief(classes)})" if name is None and classes else "")
    raise ModelError(f"{fields.path}: {named} is not supported; supported: {', '.join(supported)}")


def _check_tensors(path: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Raise ModelError for a missing tensor, an unexpected one, or a wrong shape."""
    wanted = config.wanted_tensors()
    known = config.optional_tensors() | wanted
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"{path}: missing tensors: {_list(missing)}")
    used = {name: shape for name, shape in found.items() if not name.startswith(config.ignored_prefixes)}
    if unexpected := [name for name in used if name not in known]:
        raise ModelError(f"{path}: unexpected tensors: {_list(unexpected)}")
    for name, shape in used.items():
        _check_shape(path, name, shape, known[name])


def _check_shape(path: Path, name: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise ModelError(f"{path}: tensor {name} has the shape {brief(list(shape))}, not {list(wanted)}")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(brief, names[:_SHOWN])) + more


def _parted(path: Path, config: ModelConfig, tensors: dict[str, TensorT]) -> dict[str, TensorT]:
    """Return the tensors with the parts of each joined one in its place."""
    parted = dict(tensors)
    for name, wanted, parts in config.joined_tensors():
        if name not in parted:
            continue
        whole: TensorT = parted.pop(name)
        _check_shape(path, name, whole.shape, wanted)
        for part, rows in parts.items():
            if part in parted:
                raise ModelError(f"{path}: tensors {brief(name)} and {brief(part)} are the same one")
            shape = (sum(map(len, rows)), wanted[-1])
            nbytes = whole.nbytes * math.prod(shape) // math.prod(wanted)
            parted[part] = replace(whole, shape=shape, nbytes=nbytes, rows=rows)
    return parted


# ---- directories --------------------------------------------------------------------------------------------------


def _tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the tensors of all files, without ignored buffers."""
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
        raise ModelError(f"{tensor.file}: tensor {brief(name)} is also in {brief(others[name].file.name)}")
    if len(others) == MAX_MODEL_TENSORS:
        raise ModelError(f"{tensor.file}: the model has more than {MAX_MODEL_TENSORS} tensors")


def _weight_map(directory: Path, index: Fields) -> dict[str, str]:
    """Return the file name of each tensor in the index; empty for a directory without an index."""
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
