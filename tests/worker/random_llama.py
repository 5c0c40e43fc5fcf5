"""Write a checkpoint of the shape of Llama 3.2 1B with random weights in bfloat16, for benchmarks.

Usage: python tests/worker/random_llama.py DIRECTORY, with the root and tests in PYTHONPATH. Its tokenizer has a token
for each byte, whose ids are the first of the vocabulary.
"""

import json
import sys
from pathlib import Path

import torch
from helpers.random_checkpoint import write_checkpoint
from helpers.small_models import tokenizer_json
from helpers.tiny_llama import BASE, add_llama

CONFIG = BASE | {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SCALE = 0.02  # of all weights


class FastTensors:
    """Tensors in bfloat16, made on the GPU if there is one."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def add(self, name: str, *shape: int, mean: float = 0.0, scale: float = SCALE) -> None:
        values = torch.randn(shape, dtype=torch.bfloat16, device=self._device)
        self.by_name[name] = values.mul_(SCALE).add_(mean).cpu()


def main(directory: str) -> None:
    tensors = FastTensors()
    add_llama(tensors, CONFIG)
    files = {"config.json": CONFIG, "tokenizer.json": json.loads(tokenizer_json())}
    write_checkpoint(Path(directory), files, tensors.by_name)


if __name__ == "__main__":
    main(*sys.argv[1:])
