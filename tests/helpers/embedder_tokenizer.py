"""The tokenizer of the tiny embedding models: the toy's, which puts an end of text behind each text."""

import json
from pathlib import Path

from trioengine.testing.toy_tokenizer import END_OF_TEXT, tokenizer_json


def add_tokenizer(path: Path) -> Path:
    """Put tokenizer.json into the directory of a model."""
    name, text = "<|endoftext|>", {"Sequence": {"id": "A", "type_id": 0}}
    template = [text, {"SpecialToken": {"id": name, "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {name: {"id": name, "ids": [END_OF_TEXT], "tokens": [name]}},
    }
    (path / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer_json()), "post_processor": processor}))
    return path
