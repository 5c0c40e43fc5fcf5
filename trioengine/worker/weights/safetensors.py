"""A directory with config.json and model.safetensors, or shards with their index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trioengine.core.errors import ModelError
from trioengine.worker.models.registry import find_model
from trioengine.worker.quantization.four_bit import FourBitWeight
from trioengine.worker.weights.checkpoint import TensorShape

_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes an element
_IGNORED = ".rotary_emb.inv_freq"  # buffers that old checkpoints carry; they are computed


class SafetensorsCheckpoint:
    """Tensors of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = _read_json(path / "config.json")
        self.config = find_model(fields.get("model_type"), path).config_from_hf(fields)
        self.tensors: dict[str, TensorShape] = {}
        self._files: dict[str, Any] = {}  # tensor name -> open file
        index = path / "model.safetensors.index.json"
        if index.exists():
            self._open_shards(_weight_map(index))
        else:
            self._open(path / "model.safetensors")

    def _open_shards(self, weight_map: dict[str, str]) -> None:
        for name in sorted(set(weight_map.values())):
            self._open(self.path / name)
        for name in weight_map:
            if name not in self.tensors and not name.endswith(_IGNORED):
                raise ModelError(f"{self.path}: the index names the tensor {name}, but {weight_map[name]} has none")

    def _open(self, file: Path) -> None:
        if not file.exists():
            raise ModelError(f"no file {file}")
        try:
            opened: Any = safe_open(str(file), framework="pt", device="cpu")
            for name in opened.keys():  # noqa: SIM118 -- not a mapping
                if not name.endswith(_IGNORED):
                    self._add(file, opened, name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error

    def _add(self, file: Path, opened: Any, name: str) -> None:
        part = opened.get_slice(name)
        shape, kind = tuple(part.get_shape()), part.get_dtype()
        if kind not in _DTYPES:
            raise ModelError(f"{file}: tensor {name} has the dtype {kind}; supported: {', '.join(_DTYPES)}")
        if name in self.tensors:
            raise ModelError(f"{file}: tensor {name} is in another file, too")
        size = _DTYPES[kind]
        for dimension in shape:
            size *= dimension
        self.tensors[name] = TensorShape(shape, size)
        self._files[name] = opened

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(dtype, copy=True)

    def read_four_bit(self, name: str) -> FourBitWeight | None:
        return None

    def close(self) -> None:
        self._files.clear()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"no file {file}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} lies in {file!r}, which is no file name")
    return weight_map
