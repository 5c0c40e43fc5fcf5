"""The properties of a model that the engine needs, read from a GGUF file or a Hugging Face directory.

In a directory, where two files have the same property, the one that transformers prefers counts: generation_config.json
before config.json for the end tokens, chat_template.jinja before tokenizer_config.json for the chat template, and, of a
model with images, chat_template.json between the two.

GGUF keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A GGUF file has one eos_token_id, where a
generation_config.json may list several. `read_model` adds the others: control tokens with the usual names of the ends
of a turn, a message or a text, except the file's unknown token. SmolLM2's <|endoftext|> is its unknown token: the
reference lists <|im_end|> alone, while Qwen2's reference lists both.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.image import ImageProcessing
from trioengine.core.wording import brief, excerpt
from trioengine.hub.adapter import adaptable_matrices
from trioengine.hub.checkpoint import GGUFModelHeader, map_file, read_gguf, read_safetensors
from trioengine.hub.generation_config import GENERATION_CONFIG
from trioengine.hub.model_config import Fields, Shape, read_file, read_json, read_text
from trioengine.hub.pull import known_model
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.gguf_tokenizer import CONTROL, GGUF_ARRAYS
from trioengine.text.tokenizer import Tokenizer

MAX_TOKENIZER = 32 << 20  # bytes
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
_SAMPLE = "Hello"
_TOKENIZER = "tokenizer_config.json"


class ModelFormat(enum.Enum):
    """GGUF: one file; SAFETENSORS: a directory with config.json and *.safetensors."""

    GGUF = enum.auto()
    SAFETENSORS = enum.auto()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as the engine sees it; lengths and sizes in tokens, the main end token first in `eos_token_ids`."""

    path: Path
    format: ModelFormat
    model_type: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    tokenizer: Tokenizer
    images: ImageProcessing | None = None  # None for a model of texts only
    embedding_size: int | None = None  # numbers in an embedding; None for a model that generates
    bos_token: str = ""  # for chat templates, as the next one
    eos_token: str = ""
    matrices: Mapping[str, Shape] = field(default_factory=dict, compare=False)  # that adapters can change, by name
    generation: Fields | None = field(
        default=None, compare=False
    )  # unchecked: the file or metadata that may have sampling defaults


def read_model(path: Path) -> ModelInfo:
    """Read a .gguf file, or a directory in Hugging Face's layout; blocks for a second, or for some with 262,144 tokens.

    Raises ModelError, naming the file and the field, also for a truncated or inconsistent file of weights; the error of
    a pulled file also names the remedy.
    """
    if path.is_dir():
        return _read_directory(path)
    known = known_model(path)
    try:
        return _read_gguf_file(path, None if known is None else known.chat_template)
    except ModelError as exc:
        if known is None:
            raise
        raise ModelError(f"{exc}; remove it and run `trioengine pull {known.name}`") from exc


def check_same_tokens(draft: ModelInfo, model: ModelInfo) -> None:
    """Raise ModelError where both models have a token of the same id, and it is not the same."""
    ours, theirs = model.tokenizer.token_string, draft.tokenizer.token_string
    for token_id in range(min(model.vocab_size, draft.vocab_size)):
        wants, has = ours(token_id), theirs(token_id)
        if wants and has and wants != has:
            tokens = f"token {token_id} is {brief(has)}, not {brief(wants)}"
            raise ModelError(f"{draft.path} cannot draft for {model.path}: {tokens}")


def with_chat_template(model: ModelInfo, path: Path) -> ModelInfo:
    """Return the model with the chat template in this file, which is compiled and renders a message.

    Raises ModelError, which names the file.
    """
    source = read_text(path)
    with _naming(path):
        template = ChatTemplate(source, bos_token=model.bos_token, eos_token=model.eos_token, strftime=time.strftime)
        _check_renders(template)
    return replace(model, chat_template=template)


def _check_renders(template: ChatTemplate) -> None:
    """Raise ModelError for a template that renders neither a content that is a text, nor one that is a list."""
    refusal: RequestRejected | None = None
    for content in (_SAMPLE, [{"type": "text", "text": _SAMPLE}]):
        try:
            template.render([{"role": "user", "content": content}], add_generation_prompt=True)
            return
        except RequestRejected as exc:
            refusal = refusal or exc
    assert refusal is not None
    reason = excerpt(str(refusal.__cause__ or refusal.message))
    raise ModelError(f"the chat template does not render a message: {reason}") from refusal


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path before the message of a ModelError that does not contain it."""
    try:
        yield
    except ModelError as exc:
        if str(path) in str(exc):
            raise
        raise ModelError(f"{path}: {exc}") from exc


# ---- directories --------------------------------------------------------------------------------------------------


def _read_directory(directory: Path) -> ModelInfo:
    header = read_safetensors(directory)
    config = header.config
    tokenizer_config = read_json(directory / _TOKENIZER)
    tokenizer_file = directory / "tokenizer.json"
    with _naming(tokenizer_file):
        tokenizer = Tokenizer.from_json(read_file(tokenizer_file, MAX_TOKENIZER), vocab_size=config.text.vocab_size)
        _check_image_token(config.images, tokenizer)
    generation = read_json(directory / GENERATION_CONFIG)
    return ModelInfo(
        path=directory,
        format=ModelFormat.SAFETENSORS,
        model_type=config.model_type,
        context_length=config.text.max_position_embeddings,
        vocab_size=config.text.vocab_size,
        eos_token_ids=_eos_token_ids((generation, header.fields), tokenizer_config, tokenizer, config.text.vocab_size),
        chat_template=_chat_template(directory, tokenizer_config, has_processor=config.images is not None),
        tokenizer=tokenizer,
        images=config.images,
        embedding_size=config.text.hidden_size if config.text.embeds else None,
        matrices=adaptable_matrices(config),
        bos_token=tokenizer_config.string("bos_token"),
        eos_token=tokenizer_config.string("eos_token"),
        generation=generation,
    )


def _eos_token_ids(
    configs: tuple[Fields, Fields], tokenizer_config: Fields, tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    """Return the end tokens of the first file that lists any, else the tokenizer's own eos_token."""
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
    """Compile the template of the first file that has one; older image processors have a file of their own."""
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
    with _naming(path):
        return ChatTemplate(
            source, bos_token=config.string("bos_token"), eos_token=config.string("eos_token"), strftime=time.strftime
        )


def _configured_template(config: Fields) -> str | None:
    """Return the chat template of a JSON file: a string, or the entry named `default` of a list."""
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise config.bad("chat_template", "must be a string or a list of objects")
    source = next((entry.get("template") for entry in reversed(value) if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise config.bad("chat_template", "has no template named default")
    return source


# ---- GGUF files ---------------------------------------------------------------------------------------------------


def _read_gguf_file(path: Path, default_template: str | None) -> ModelInfo:
    # Not closed explicitly: the last reference to the mapping unmaps it, and a traceback may hold one.
    header = read_gguf(memoryview(map_file(path)), path, arrays=GGUF_ARRAYS)
    with _naming(path):
        metadata = _Metadata(header, path)
        return ModelInfo(
            path=path,
            format=ModelFormat.GGUF,
            model_type=header.config.model_type,
            context_length=header.config.max_position_embeddings,
            vocab_size=header.config.vocab_size,
            eos_token_ids=metadata.eos_token_ids(),
            chat_template=metadata.chat_template(default_template),
            tokenizer=metadata.tokenizer,
            embedding_size=header.config.hidden_size if header.config.embeds else None,
            matrices=adaptable_matrices(header.config),
            bos_token=metadata.token("bos"),
            eos_token=metadata.token("eos"),
            generation=Fields(path, header.metadata),
        )


class _Metadata:
    """The metadata of a GGUF file, each key checked as it is read."""

    def __init__(self, header: GGUFModelHeader, path: Path) -> None:
        self._fields = Fields(path, header.metadata)
        self.tokenizer = Tokenizer.from_gguf(header.metadata)
        self._tokens: list[str] = header.metadata["tokenizer.ggml.tokens"]

    def eos_token_ids(self) -> tuple[int, ...]:
        named = [self._token_id(name) for name in ("eos", "eot", "eom")]
        unknown = self._token_id("unknown")
        types = self._fields.get("tokenizer.ggml.token_type") or []
        pairs = enumerate(zip(self._tokens, types, strict=False))
        control = {token: id for id, (token, token_type) in pairs if token_type == CONTROL}
        usual = [control[token] for token in END_TOKENS if token in control and control[token] != unknown]
        return tuple(dict.fromkeys(id for id in (*named, *usual) if id is not None))

    def chat_template(self, default: str | None) -> ChatTemplate | None:
        source = self._fields.get("tokenizer.chat_template")
        source = default if source is None else source
        if source is None:
            return None
        if not isinstance(source, str):
            raise self._fields.bad("tokenizer.chat_template", "must be a string of at most 1 MiB")
        return ChatTemplate(source, bos_token=self.token("bos"), eos_token=self.token("eos"), strftime=time.strftime)

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self._fields.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self._tokens):
            raise self._fields.bad(key, f"must be a token id below {len(self._tokens)}")
        return token_id

    def token(self, name: str) -> str:
        token_id = self._token_id(name)
        return "" if token_id is None else self._tokens[token_id]
