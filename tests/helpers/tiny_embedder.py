"""Tiny embedding models with random weights, as sentence-transformers writes them: without a head and a prefix."""

import json
from pathlib import Path
from typing import Any

from helpers import tiny_decoders
from helpers.random_checkpoint import write_checkpoint
from helpers.tiny_llama import PROMPT

VOCAB_SIZE, END_OF_TEXT = 259, 256  # of the toy's tokenizer: see embedder_tokenizer
VARIANTS = ("qwen3", "qwen3-tied", "mistral-window", "lfm2")
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[3:4], PROMPT[20:75]]
KIND = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{KIND}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{KIND}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{KIND}Normalize"},
]
POOLING = {
    "word_embedding_dimension": 48,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}
PROMPT_CONFIG = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}, "similarity_fn_name": "cosine"}


def config(variant: str) -> dict[str, Any]:
    """The content of config.json."""
    return tiny_decoders.config(variant) | {"vocab_size": VOCAB_SIZE, "eos_token_id": END_OF_TEXT}


def write(
    path: Path,
    variant: str = "qwen3-tied",
    *,
    modules: Any = MODULES,
    pooling: dict[str, Any] = POOLING,
    prefix: str = "",
    **changes: Any,
) -> Path:
    """A directory of the variant. `modules`: None for none; `prefix` begins the tensors' names."""
    fields = config(variant) | changes
    tensors = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in tiny_decoders.tensors(variant, **fields).items()
        if name != "lm_head.weight"
    }
    files = {"config.json": fields, "config_sentence_transformers.json": PROMPT_CONFIG}
    write_checkpoint(path, files if modules is None else {**files, "modules.json": modules}, tensors)
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path
