"""What every architecture's configuration has; nothing else but a model's own files asks for more."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol

from trioengine.core.image import ImageProcessing
from trioengine.hub.llama_config import LlamaConfig, Shape


class ModelConfig(Protocol):
    """A frozen dataclass; two checkpoints are the same model if their configurations are equal."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json, or the `general.architecture` of a GGUF file."""
        ...

    @property
    def text(self) -> LlamaConfig:
        """The decoder: its vocabulary, its context, and the heads of the KV cache."""
        ...

    @property
    def images(self) -> ImageProcessing | None:
        """How the model sees images; None: it sees none."""
        ...

    def wanted_tensors(self) -> dict[str, Shape]:
        """Every tensor that the model needs, by its Hugging Face name."""
        ...

    def optional_tensors(self) -> dict[str, Shape]:
        """Tensors that may be there."""
        ...
