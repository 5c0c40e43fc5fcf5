"""Write a model with random weights, and a draft model that is its first layers, for benchmarks of speculation.

Usage: python tests/worker/draft_pair.py DIRECTORY [SHARE], with the root and tests in PYTHONPATH. It writes
DIRECTORY/model and DIRECTORY/draft. The layers that the draft model lacks add SHARE of a layer's numbers: with 0, the
default, all drafts are kept, and with more fewer of them.
"""

import json
import sys
from pathlib import Path

from helpers.random_checkpoint import write_checkpoint
from helpers.small_models import tokenizer_json
from helpers.tiny_llama import BASE, add_llama
from random_llama import FastTensors

LAYERS, DRAFT_LAYERS = 24, 2
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LAST_OF_LAYERS = ("o_proj.weight", "down_proj.weight")


def layer_of(name: str) -> int:
    """The number of a tensor's layer; -1 for a tensor of none."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def main(directory: str, share: str = "0") -> None:
    tensors = FastTensors()
    config = BASE | SHAPE | {"num_hidden_layers": LAYERS}
    add_llama(tensors, config)
    for name, values in tensors.by_name.items():
        if layer_of(name) >= DRAFT_LAYERS and name.endswith(LAST_OF_LAYERS):
            values.mul_(float(share))
    drafts = {name: values for name, values in tensors.by_name.items() if layer_of(name) < DRAFT_LAYERS}
    for folder, num_layers, weights in (("model", LAYERS, tensors.by_name), ("draft", DRAFT_LAYERS, drafts)):
        files = {
            "config.json": config | {"num_hidden_layers": num_layers},
            "tokenizer.json": json.loads(tokenizer_json()),
        }
        write_checkpoint(Path(directory) / folder, files, weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
