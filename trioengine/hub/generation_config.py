"""The sampling defaults of a model: generation_config.json beside a checkpoint, or the metadata of a GGUF file.

The keys, and the parameters that they set, follow vLLM (`--generation-config`) and llama.cpp (`general.sampling.*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.sampling_params import checked_defaults
from trioengine.core.wording import brief
from trioengine.hub.model_config import Fields, read_json

GENERATION_CONFIG = "generation_config.json"
AUTO, NONE = "auto", "none"
_PARAMETERS = {  # by their keys in generation_config.json
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_PARAMETERS = {  # by their keys in a GGUF file
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling_defaults(own: Fields | None, source: str) -> Mapping[str, float]:
    """Return the sampling defaults by parameter; `own` are the fields that came with the model.

    `source` is auto (the model's own), none, or the path of a file or of a directory with a generation_config.json.
    Raises ModelError, which names file and key, for a value outside the bounds of its parameter, and for a path that
    is not there.
    """
    if source == NONE:
        return {}
    fields = own if source == AUTO else _read(Path(source))
    if fields is None:
        return {}
    defaults: dict[str, float] = {}
    for key, name in (_PARAMETERS | _GGUF_PARAMETERS).items():
        if (value := fields.get(key)) is not None:
            try:
                defaults |= checked_defaults({name: value})
            except RequestRejected as exc:
                rule = exc.message.removeprefix(f"{name} ")
                raise ModelError(f"{fields.path}: {key} {rule}; generation_config=none ignores it") from None
    return defaults


def _read(path: Path) -> Fields:
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"generation_config must be auto, none, or an existing path, got {brief(str(path))}")
    return read_json(file)
