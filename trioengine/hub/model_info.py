"""What the engine must know of a model; the weights are the worker's."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.core.image import ImageProcessing
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import Tokenizer


class ModelFormat(enum.Enum):
    """GGUF: one file; SAFETENSORS: a directory with config.json and *.safetensors."""

    GGUF = enum.auto()
    SAFETENSORS = enum.auto()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as the engine sees it; lengths and sizes in tokens, the main one of `eos_token_ids` first."""

    path: Path
    format: ModelFormat
    model_type: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    tokenizer: Tokenizer
    images: ImageProcessing | None = None  # None: a model of texts only


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's path before what a ModelError says, unless it is there already."""
    try:
        yield
    except ModelError as exc:
        if str(path) in str(exc):
            raise
        raise ModelError(f"{path}: {exc}") from exc
