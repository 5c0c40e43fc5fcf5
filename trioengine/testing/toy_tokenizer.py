"""The toy model's tokenizer: a token for each byte, and a few special ones."""

from __future__ import annotations

import json

from trioengine.core.image import ImageProcessing

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 259


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def toy_tokenizer_json(images: ImageProcessing | None) -> str:
    """The file tokenizer.json; with `images` it has a token for them."""
    special = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
    if images is not None:
        special[images.image_token_id] = images.image_token
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": id, "content": content, **flags} for id, content in special.items()],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary | {text: id for id, text in special.items()}, "merges": []},
        }
    )
