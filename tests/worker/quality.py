"""Measure how far each way to compute a model is from float32, on the project's own decision records.

Usage, with the root and tests in PYTHONPATH:
    python tests/worker/quality.py MODEL.gguf [--tokens N] [--logits FILE.npy] [--save-tokens FILE.json]

Prints for each mode the mean and the largest KL divergence from float32's distribution of the next token, the share of
positions with the same best token, and the difference of the mean negative log-likelihood, with its standard error.
`--logits` adds another engine's logits [N, vocab_size] for the tokens that `--save-tokens` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from helpers.torch_driver import load
from torch import Tensor

from trioengine.core.sampling_params import ResolvedParams
from trioengine.hub.model_info import read_model
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence

RECORDS = Path(__file__).parents[2] / "docs" / "decisions"
MODES = {
    "none, bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "gguf, bfloat16": {"dtype": "bfloat16", "quantization": "gguf"},
    "gguf, float32": {"dtype": "float32", "quantization": "gguf"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "none, float32, kv int8": {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "int8"},
    "gguf, bfloat16, kv int8": {"dtype": "bfloat16", "quantization": "gguf", "kv_cache_dtype": "int8"},
}


def text_tokens(model: str, count: int) -> list[int]:
    """The first tokens of the records, in their order."""
    text = "\n".join(path.read_text() for path in sorted(RECORDS.glob("*.md")))
    return read_model(Path(model)).tokenizer.encode(text)[:count]


def logits_of(runner: TorchModelRunner, tokens: list[int]) -> Tensor:
    """The logits [len(tokens), vocab_size] behind every token, in float32; computed in chunks, as in a server."""
    info = runner.info
    scheduler = Scheduler(
        Limits(info.vocab_size, info.max_model_len, info.kv_blocks_total, info.block_size, windows=info.windows)
    )
    scheduler.add(Sequence(0, 0, list(tokens), len(tokens), ResolvedParams(temperature=0.0, max_tokens=1), frozenset()))
    found = []
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None, "it has work"
        with torch.inference_mode():
            batch = make_batch(output, info.block_size)
            every = replace(batch, sample_rows=torch.arange(len(batch.token_ids)))
            hidden = runner.model.forward(every, runner.target.spec.kernels.attention(every, runner.cache))
            found.append(runner.model.logits(hidden))
        scheduler.update(output, runner.execute(output))
    return torch.cat(found)[: len(tokens)]


def rows(model: str, tokens: list[int], logits: Path | None) -> Iterator[tuple[str, Tensor]]:
    for name, options in MODES.items():
        yield name, logits_of(load(model, kv_cache_memory=512 << 20, **options), tokens)
    if logits is not None:
        yield logits.name, torch.from_numpy(np.load(logits)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--logits", type=Path)
    parser.add_argument("--save-tokens", type=Path)
    asked = parser.parse_args()
    tokens = text_tokens(asked.model, asked.tokens)
    if asked.save_tokens is not None:
        asked.save_tokens.write_text(json.dumps(tokens))
    exact = logits_of(load(asked.model, "float32", quantization="none", kv_cache_memory=512 << 20), tokens)
    expected = exact.log_softmax(dim=-1)
    best = exact.argmax(dim=-1)
    following = torch.tensor(tokens[1:])[:, None]
    print("| | mean KL, 1e-3 | max KL | same best token | NLL, 1e-3 |\n| --- | --- | --- | --- | --- |")
    for name, logits in rows(asked.model, tokens, asked.logits):
        found = logits.log_softmax(dim=-1)
        divergence = (expected.exp() * (expected - found)).sum(dim=-1)
        change = (expected - found)[:-1].gather(1, following)
        error = change.std().item() / len(change) ** 0.5
        same = (logits.argmax(dim=-1) == best).float().mean().item()
        mean, largest = divergence.mean().item(), divergence.max().item()
        print(
            f"| {name} | {1e3 * mean:.2f} | {largest:.3f} | {same:.1%} "
            f"| {1e3 * change.mean().item():.1f} +- {1e3 * error:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
