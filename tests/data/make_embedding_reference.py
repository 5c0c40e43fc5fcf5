"""Write the embeddings of the tiny embedding models as transformers computes them, in float32.

An embedding is the last hidden state of the last token, divided by its length. Needs torch, safetensors, trioengine,
and transformers, which is no test dependency.
Usage: python make_embedding_reference.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import tiny_embedder


def embeddings(path: Path) -> list[list[float]]:
    """The embedding of each of PROMPTS."""
    model, loading = AutoModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    model.eval()
    last = [model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1] for ids in tiny_embedder.PROMPTS]
    return [[round(value, 7) for value in (hidden / hidden.norm()).tolist()] for hidden in last]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        found = {
            variant: embeddings(tiny_embedder.write(Path(directory) / variant, variant))
            for variant in tiny_embedder.VARIANTS
        }
    lines = ",\n".join(f"{json.dumps(variant)}: {json.dumps(vectors)}" for variant, vectors in found.items())
    Path(__file__).with_name("embedding_reference.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
