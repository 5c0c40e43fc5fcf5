"""The supported architectures, by the `model_type` of config.json or the `general.architecture` of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.bounds import brief
from trioengine.core.errors import ModelError
from trioengine.hub import llama_config, llama_gguf
from trioengine.hub.fields import Fields
from trioengine.hub.llama_config import LlamaConfig, Shape

_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the configuration and the tensors of one architecture are read."""

    config_from_hf: Callable[[Fields, int], LlamaConfig]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Shape], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # of a GGUF tensor
    wanted_tensors: Callable[[LlamaConfig], dict[str, Shape]]
    optional_tensors: Callable[[LlamaConfig], dict[str, Shape]]

    def check_tensors(self, path: Path, config: LlamaConfig, found: Mapping[str, Shape]) -> None:
        """Raise ModelError unless these are all tensors that the model needs, and perhaps optional ones."""
        wanted = self.wanted_tensors(config)
        known = self.optional_tensors(config) | wanted
        if missing := [name for name in wanted if name not in found]:
            raise ModelError(f"{path}: missing tensors: {_list(missing)}")
        if unexpected := [name for name in found if name not in known]:
            raise ModelError(f"{path}: unexpected tensors: {_list(unexpected)}")
        for name, shape in found.items():
            if shape != known[name]:
                raise ModelError(f"{path}: tensor {name} has the shape {brief(list(shape))}, not {list(known[name])}")


ARCHITECTURES = {
    "llama": Architecture(
        config_from_hf=llama_config.config_from_hf,
        config_from_gguf=llama_gguf.config_from_gguf,
        hf_name=llama_gguf.hf_name,
        wanted_tensors=llama_config.wanted_tensors,
        optional_tensors=llama_config.optional_tensors,
    )
}


def find_architecture(fields: Fields, field: str) -> Architecture:
    """The architecture that the field names. Raises ModelError, listing the supported ones, if it is none of them."""
    name = fields.get(field)
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    classes = fields.get("architectures")  # of transformers: all that a config.json without a model_type has
    named = f"{field} {brief(name)}" + (f" (architectures {brief(classes)})" if name is None and classes else "")
    raise ModelError(f"{fields.path}: {named} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(brief, names[:_SHOWN])) + more
