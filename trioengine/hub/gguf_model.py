"""A model in one GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A GGUF file has one eos_token_id, where Hugging Face's
generation_config.json may list several. What it lists beyond the first is added here: the ends of a turn, a message or
a text that are control tokens under their usual names. What the file calls its unknown token is none of them: so
SmolLM2's <|endoftext|>, whose reference lists <|im_end|> alone, while Qwen2's reference lists both.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.core.gguf import GGUFHeader, parse_gguf
from trioengine.hub.model_info import ModelFormat, ModelInfo, is_count, naming
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import CONTROL, Tokenizer

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
_EMBEDDING = "token_embd.weight"


def read(path: Path) -> ModelInfo:
    """Raises ModelError, naming the file and the key."""
    header = _header(path)
    with naming(path):
        return _Metadata(header).model(path)


def _header(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            # Not closed by name: it goes with its last reference, which may be a traceback's.
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None
    return parse_gguf(memoryview(buffer), str(path))


class _Metadata:
    """The header's metadata, each key checked as it is asked for."""

    def __init__(self, header: GGUFHeader) -> None:
        self._metadata: Mapping[str, Any] = header.metadata
        self._rows = next((tensor.shape[0] for tensor in header.tensors if tensor.name == _EMBEDDING), None)
        self._tokens: list[str] = []

    def model(self, path: Path) -> ModelInfo:
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise ModelError("split.count: a model split into several files is not supported: merge them first")
        model_type = self._metadata.get("general.architecture")
        if not isinstance(model_type, str) or not model_type:
            raise ModelError("general.architecture is missing or no string")
        context_length = self._metadata.get(f"{model_type}.context_length")
        if not is_count(context_length):
            raise ModelError(f"{model_type:.60}.context_length must be a positive integer, got {context_length!r:.60}")
        if not isinstance(self._metadata.get("tokenizer.ggml.token_type", []), list):
            raise ModelError("tokenizer.ggml.token_type is no list")
        tokenizer = Tokenizer.from_gguf(self._metadata)
        self._tokens = self._metadata["tokenizer.ggml.tokens"]
        if self._rows is not None and len(self._tokens) > self._rows:
            raise ModelError(f"tokenizer.ggml.tokens has {len(self._tokens)} tokens, {_EMBEDDING} {self._rows}")
        return ModelInfo(
            path=path,
            format=ModelFormat.GGUF,
            model_type=model_type,
            context_length=context_length,
            vocab_size=len(self._tokens) if self._rows is None else self._rows,
            eos_token_ids=self._eos_token_ids(),
            chat_template=self._chat_template(),
            tokenizer=tokenizer,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        named = [self._token_id(name) for name in ("eos", "eot", "eom")]
        unknown = self._token_id("unknown")
        types = self._metadata.get("tokenizer.ggml.token_type", [])
        pairs = enumerate(zip(self._tokens, types, strict=False))
        control = {token: id for id, (token, token_type) in pairs if token_type == CONTROL}
        usual = [control[token] for token in END_TOKENS if token in control and control[token] != unknown]
        return tuple(dict.fromkeys(id for id in (*named, *usual) if id is not None))

    def _chat_template(self) -> ChatTemplate | None:
        source = self._metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError("tokenizer.chat_template is no string")
        return ChatTemplate(source, bos_token=self._token("bos"), eos_token=self._token("eos"))

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id: Any = self._metadata.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self._tokens):
            raise ModelError(f"{key} must be a token id below {len(self._tokens)}, got {token_id!r:.60}")
        return token_id

    def _token(self, name: str) -> str:
        token_id = self._token_id(name)
        return "" if token_id is None else self._tokens[token_id]
