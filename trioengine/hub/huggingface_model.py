"""A model in a directory, as Hugging Face's transformers writes them.

Where two files say the same, the one that transformers believes wins: generation_config.json over config.json for the
end tokens, chat_template.jinja over tokenizer_config.json for the chat template, and, of a model that sees images,
chat_template.json between the two.
"""

from __future__ import annotations

from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.core.image import ImageProcessing
from trioengine.hub.checkpoint_header import read_safetensors
from trioengine.hub.fields import Fields, read_file, read_json, read_text
from trioengine.hub.model_info import ModelFormat, ModelInfo, naming
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import Tokenizer

MAX_TOKENIZER = 32 << 20  # bytes
_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer_config.json"


def read(directory: Path) -> ModelInfo:
    """Raises ModelError, naming the file and the field."""
    header = read_safetensors(directory)
    config = header.config
    tokenizer_config = read_json(directory / _TOKENIZER)
    tokenizer_file = directory / "tokenizer.json"
    with naming(tokenizer_file):
        tokenizer = Tokenizer.from_json(read_file(tokenizer_file, MAX_TOKENIZER), vocab_size=config.text.vocab_size)
        _check_image_token(config.images, tokenizer)
    end_configs = (read_json(directory / _GENERATION), header.fields)
    return ModelInfo(
        path=directory,
        format=ModelFormat.SAFETENSORS,
        model_type=config.model_type,
        context_length=config.text.max_position_embeddings,
        vocab_size=config.text.vocab_size,
        eos_token_ids=_eos_token_ids(end_configs, tokenizer_config, tokenizer, config.text.vocab_size),
        chat_template=_chat_template(directory, tokenizer_config, has_processor=config.images is not None),
        tokenizer=tokenizer,
        images=config.images,
    )


def _eos_token_ids(
    configs: tuple[Fields, Fields], tokenizer_config: Fields, tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    """Of the first file that lists any; at last, the tokenizer's own eos_token."""
    for config in configs:
        if ids := config.token_ids("eos_token_id", vocab_size):
            return ids
    eos = tokenizer.special_tokens.get(tokenizer_config.string("eos_token"))
    if eos is not None and eos >= vocab_size:
        raise tokenizer_config.bad("eos_token", f"must be a token below {vocab_size}")
    return () if eos is None else (eos,)


def _check_image_token(images: ImageProcessing | None, tokenizer: Tokenizer) -> None:
    if images is not None and (found := tokenizer.special_tokens.get(images.image_token)) != images.image_token_id:
        wanted = f"the special token {images.image_token} must have config.json's image_token_id"
        raise ModelError(f"{wanted}, {images.image_token_id}, got {found}")


def _chat_template(directory: Path, config: Fields, *, has_processor: bool) -> ChatTemplate | None:
    """Of the first file that has one; older processors of images have a file of their own."""
    path = directory / "chat_template.jinja"
    processor = read_json(directory / "chat_template.json") if has_processor else None
    source: str | None
    if path.exists():
        source = read_text(path)
    elif processor is not None and (source := _configured_template(processor)) is not None:
        path = processor.path
    else:
        path, source = directory / _TOKENIZER, _configured_template(config)
    if source is None:
        return None
    with naming(path):
        return ChatTemplate(source, bos_token=config.string("bos_token"), eos_token=config.string("eos_token"))


def _configured_template(config: Fields) -> str | None:
    """The chat template of a JSON file: a string, or of a list the one named `default`."""
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise config.bad("chat_template", "must be a string or a list of objects")
    source = next((entry.get("template") for entry in reversed(value) if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise config.bad("chat_template", "has no template named default")
    return source
