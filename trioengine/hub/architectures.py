"""The supported architectures, by the `model_type` of config.json or the `general.architecture` of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.bounds import brief
from trioengine.core.errors import ModelError
from trioengine.hub import idefics3_config, llama_config, llama_gguf
from trioengine.hub.fields import Fields
from trioengine.hub.llama_config import LlamaConfig, Shape
from trioengine.hub.model_config import ModelConfig

_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How a GGUF file's metadata and tensor names are read."""

    config: Callable[[Mapping[str, Any], Mapping[str, Shape], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # of a GGUF tensor


# By config.json's fields, and the number of tensors.
HF_ARCHITECTURES: dict[str, Callable[[Fields, int], ModelConfig]] = {
    "llama": llama_config.config_from_hf,
    "idefics3": idefics3_config.config_from_hf,
    "smolvlm": idefics3_config.config_from_hf,
}
GGUF_ARCHITECTURES = {"llama": GGUFArchitecture(llama_gguf.config_from_gguf, llama_gguf.hf_name)}


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
