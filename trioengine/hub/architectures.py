"""The supported architectures, by the `model_type` of config.json or the `general.architecture` of a GGUF file.

Each module of this package whose name ends with `_config`, and that declares MODEL_TYPES, reads the files of these
architectures: `config_from_hf`, and for GGUF `config_from_gguf`, `hf_name` and `interleaved_heads`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trioengine import hub
from trioengine.core.bounds import brief
from trioengine.core.errors import ModelError
from trioengine.hub.fields import Fields
from trioengine.hub.llama_config import LlamaConfig, Shape
from trioengine.hub.model_config import ModelConfig

_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file's metadata and tensors are read."""

    config: Callable[[Mapping[str, Any], Mapping[str, Shape], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # of a GGUF tensor
    interleaved_heads: Callable[[str, LlamaConfig], int | None]  # of a tensor, by its Hugging Face name


def _config_modules() -> Iterator[tuple[str, ModuleType]]:
    """The modules that read configurations, by model type, in alphabetical order."""
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
