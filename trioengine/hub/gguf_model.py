"""A model in one GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A GGUF file has one eos_token_id, where Hugging Face's
generation_config.json may list several. What it lists beyond the first is added here: the ends of a turn, a message or
a text that are control tokens under their usual names. What the file calls its unknown token is none of them: so
SmolLM2's <|endoftext|>, whose reference lists <|im_end|> alone, while Qwen2's reference lists both.
"""

from __future__ import annotations

from pathlib import Path

from trioengine.hub.checkpoint_header import GGUFModelHeader, map_file, read_gguf
from trioengine.hub.fields import Fields
from trioengine.hub.model_info import ModelFormat, ModelInfo, naming
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.tokenizer import CONTROL, GGUF_ARRAYS, Tokenizer

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")


def read(path: Path) -> ModelInfo:
    """Raises ModelError, naming the file and the key."""
    # Not closed by name: the mapping goes with its last reference, which may be a traceback's.
    header = read_gguf(memoryview(map_file(path)), path, arrays=GGUF_ARRAYS)
    with naming(path):
        return _Metadata(header, path).model()


class _Metadata:
    """The header's metadata, each key checked as it is asked for."""

    def __init__(self, header: GGUFModelHeader, path: Path) -> None:
        self._fields = Fields(path, header.metadata)
        self._config = header.config
        self._tokenizer = Tokenizer.from_gguf(header.metadata)
        self._tokens: list[str] = header.metadata["tokenizer.ggml.tokens"]

    def model(self) -> ModelInfo:
        return ModelInfo(
            path=self._fields.path,
            format=ModelFormat.GGUF,
            model_type=self._config.model_type,
            context_length=self._config.max_position_embeddings,
            vocab_size=self._config.vocab_size,
            eos_token_ids=self._eos_token_ids(),
            chat_template=self._chat_template(),
            tokenizer=self._tokenizer,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        named = [self._token_id(name) for name in ("eos", "eot", "eom")]
        unknown = self._token_id("unknown")
        types = self._fields.get("tokenizer.ggml.token_type") or []
        pairs = enumerate(zip(self._tokens, types, strict=False))
        control = {token: id for id, (token, token_type) in pairs if token_type == CONTROL}
        usual = [control[token] for token in END_TOKENS if token in control and control[token] != unknown]
        return tuple(dict.fromkeys(id for id in (*named, *usual) if id is not None))

    def _chat_template(self) -> ChatTemplate | None:
        source = self._fields.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise self._fields.bad("tokenizer.chat_template", "must be a string of at most 1 MiB")
        return ChatTemplate(source, bos_token=self._token("bos"), eos_token=self._token("eos"))

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self._fields.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self._tokens):
            raise self._fields.bad(key, f"must be a token id below {len(self._tokens)}")
        return token_id

    def _token(self, name: str) -> str:
        token_id = self._token_id(name)
        return "" if token_id is None else self._tokens[token_id]
