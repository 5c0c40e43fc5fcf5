"""Run prompts through the real scheduler and the torch runner, without a worker around them."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.messages import NO_ADAPTER
from trioengine.core.sampling_params import EMBEDDING, ResolvedParams, resolved_params
from trioengine.worker.compiler import find_compiler
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, ScheduledSequence, SchedulerOutput, Sequence

DATA = Path(__file__).parents[1] / "data"


def reference(name):
    return json.loads((DATA / name).read_text())


def needs_compiler():
    """Skip the test where there is no C++ compiler; in CI there must be one."""
    if find_compiler() is None and os.environ.get("CI") != "true":
        pytest.skip("no C++ compiler")


def needs_cuda():
    """Skip the test where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def backend(name):
    """The options of `load` for the kernels `native` or `torch` of the CPU, or for `cuda`; skip the test without it."""
    if name == "native":
        needs_compiler()
    if name == "cuda":
        needs_cuda()
        return {"device": "cuda"}
    return {"kernels": name}


def load(path, dtype="float32", on_progress=lambda done, total: None, **config):
    config = {"device": "cpu", "kv_cache_memory": 64 << 20, **config}
    return TorchModelRunner.load(WorkerConfig(str(path), dtype=dtype, **config), on_progress)


def spoil(cache):
    """Fill a cache, of KV or of states, with what a step must not read: nan, or integers whose scale is nan."""
    tensors = (*cache.layers, *cache.scales) if isinstance(cache, KVCache) else cache.parts
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 77)


def kv_parts(cache, layer):
    """A layer's keys and values, views of [num_blocks, num_kv_heads, block_size * head_dim]; the places of elements."""
    return [*zip(cache.layers[layer], cache.layout.places(), strict=True)]


def logprobs_after(runner, tokens):
    """The log-probabilities of the token after these, by token id; the cache's first blocks are overwritten."""
    blocks = [*range(-(-len(tokens) // runner.info.block_size))]
    params = ResolvedParams(temperature=0.0, seed=0)
    sequence = Sequence(0, 0, list(tokens), len(tokens), params, frozenset(), block_table=blocks, window_table=blocks)
    output = SchedulerOutput((ScheduledSequence(sequence, len(tokens)),))
    batch = make_batch(output, runner.info.block_size).to(runner.model.device)
    with torch.inference_mode():
        hidden = runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache))
        return runner.model.logits(hidden)[0].log_softmax(dim=-1)


def generate(runner, prompts, max_tokens, params=None, adapters=(), **limits):
    """Greedy answers of all prompts at once, and the scheduler's statistics; `adapters` are ids, one a prompt."""
    params = params or ResolvedParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    sequences, _, statistics = run(runner, prompts, params, limits, adapters)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences], statistics


def embed(runner, prompts, **limits):
    """The embeddings of all prompts at once, as bytes, and the scheduler's statistics."""
    _, rows, statistics = run(runner, prompts, resolved_params(EMBEDDING, {}, seed=0), {"embeds": True, **limits})
    found = {row.request: row.embedding for row in rows}
    assert len(rows) == len(found) == len(prompts)
    assert all(row.finish_reason == "length" and not row.token_ids for row in rows)
    return [found[number] for number in range(len(prompts))], statistics


def run(runner, prompts, params, limits, adapters=()):
    """The sequences of all prompts, run at once, the runner's rows, and the scheduler's statistics."""
    limits = {
        "vocab_size": runner.info.vocab_size,
        "max_model_len": runner.info.max_model_len,
        "kv_blocks_total": runner.info.kv_blocks_total,
        "block_size": runner.info.block_size,
        "state_slots": runner.info.state_slots,
        "windows": runner.info.windows,
        **limits,
    }
    scheduler = Scheduler(Limits(**limits), drafter=runner)
    sequences = [Sequence(i, i, list(prompt), len(prompt), params, frozenset()) for i, prompt in enumerate(prompts)]
    for sequence, adapter in zip(sequences, adapters or [NO_ADAPTER] * len(sequences), strict=True):
        sequence.adapter = adapter
        scheduler.add(sequence)
    rows = []
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None, "it has work"
        found = runner.execute(output)
        scheduler.update(output, found)
        rows += found
    scheduler.check_integrity()
    return sequences, rows, scheduler.statistics(0)
