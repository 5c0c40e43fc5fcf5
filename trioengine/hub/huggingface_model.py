"""A model in a directory, as Hugging Face's transformers writes them.

Where two files say the same, the one that transformers believes wins: generation_config.json over config.json for the
end tokens, chat_template.jinja over tokenizer_config.json for the chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.hub.model_info import ModelFormat, ModelInfo, is_count, naming
from trioengine.hub.safetensors_header import check_safetensors
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import Tokenizer

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_INDEX = "model.safetensors.index.json"


def read(directory: Path) -> ModelInfo:
    """Raises ModelError, naming the file and the field."""
    config = _Json(directory / _CONFIG, required=True)
    tokenizer_config = _Json(directory / _TOKENIZER)
    model_type = config.string("model_type")
    if not model_type:
        raise config.bad("model_type", "must be a string")
    vocab_size = config.count("vocab_size")
    tokenizer_file = directory / "tokenizer.json"
    with naming(tokenizer_file):
        tokenizer = Tokenizer.from_json(_text(tokenizer_file), vocab_size=vocab_size)
    _check_weights(directory)
    return ModelInfo(
        path=directory,
        format=ModelFormat.SAFETENSORS,
        model_type=model_type,
        context_length=config.count("max_position_embeddings"),
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids((_Json(directory / _GENERATION), config), tokenizer_config, tokenizer, vocab_size),
        chat_template=_chat_template(directory, tokenizer_config),
        tokenizer=tokenizer,
    )


class _Json:
    """A JSON file whose fields are checked as they are asked for; a file that need not be there may be absent."""

    def __init__(self, path: Path, *, required: bool = False) -> None:
        self.path = path
        self._fields: dict[str, Any] = {}
        if not required and not path.exists():
            return
        try:
            fields = json.loads(_text(path))
        except (ValueError, RecursionError) as exc:
            raise ModelError(f"{path}: not JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: no JSON object")
        self._fields = fields

    def bad(self, field: str, why: str) -> ModelError:
        return ModelError(f"{self.path}: {field} {why}, got {self._fields.get(field)!r:.60}")

    def get(self, field: str) -> Any:
        return self._fields.get(field)

    def string(self, field: str) -> str:
        """A string, or an added token's object with its `content`; "" if it is absent or null."""
        value = self._fields.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise self.bad(field, "must be a string")
        return value or ""

    def count(self, field: str) -> int:
        value = self._fields.get(field)
        if not is_count(value):
            raise self.bad(field, "must be a positive integer")
        return value

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; empty if it is absent or null."""
        value = self._fields.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            raise self.bad(field, f"must be token ids below {vocab_size}")
        return tuple(dict.fromkeys(ids))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ModelError(f"{path}: not UTF-8") from exc


def _eos_token_ids(
    configs: tuple[_Json, _Json], tokenizer_config: _Json, tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    """Of the first file that lists any; at last, the tokenizer's own eos_token."""
    for config in configs:
        if ids := config.token_ids("eos_token_id", vocab_size):
            return ids
    eos = tokenizer.special_tokens.get(tokenizer_config.string("eos_token"))
    if eos is not None and eos >= vocab_size:
        raise tokenizer_config.bad("eos_token", f"must be a token below {vocab_size}")
    return () if eos is None else (eos,)


def _chat_template(directory: Path, config: _Json) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source: str | None
    if path.exists():
        source = _text(path)
    else:
        path, source = directory / _TOKENIZER, _configured_template(config)
    if source is None:
        return None
    with naming(path):
        return ChatTemplate(source, bos_token=config.string("bos_token"), eos_token=config.string("eos_token"))


def _configured_template(config: _Json) -> str | None:
    """The chat template of tokenizer_config.json: a string, or of a list the one named `default`."""
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise config.bad("chat_template", "must be a string or a list of objects")
    source = {str(entry.get("name")): entry.get("template") for entry in value}.get("default")
    if not isinstance(source, str):
        raise config.bad("chat_template", "has no template named default")
    return source


def _check_weights(directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory}: the directory has no *.safetensors")
    index = _Json(directory / _INDEX)
    weight_map = index.get("weight_map") or {}
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise index.bad("weight_map", "must be an object of file names")
    if missing := sorted(set(weight_map.values()) - {file.name for file in files}):
        raise index.bad("weight_map", f"names {missing[0]:.60}, which is not there")
    for file in files:
        check_safetensors(file)
