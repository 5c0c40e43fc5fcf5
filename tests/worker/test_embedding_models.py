"""Embedding models on tiny checkpoints: against transformers, in pieces, in a crowd, and from GGUF."""

import gguf
import numpy as np
import pytest
import torch
from helpers import tiny_decoders, tiny_embedder
from helpers.tiny_embedder import PROMPTS
from helpers.torch_driver import backend, embed, load, reference
from test_architectures import write_gguf

from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.messages import RequestFailed
from trioengine.core.sampling_params import EMBEDDING, resolved_params
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

REFERENCE = reference("embedding_reference.json")


@pytest.fixture(params=tiny_embedder.VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def runner(tmp_path, variant, options):
    return load(tiny_embedder.write(tmp_path, variant), kv_cache_memory=8 << 20, **options)


def vectors(rows):
    return [np.frombuffer(row, dtype="<f4").tolist() for row in rows]


@pytest.mark.parametrize("budget", [2048, 33, 7, 1])
def test_embeddings_are_those_of_transformers(runner, variant, budget):
    rows, _ = embed(runner, PROMPTS, max_num_batched_tokens=budget)
    for found, expected in zip(vectors(rows), REFERENCE[variant], strict=True):
        assert found == pytest.approx(expected, abs=2e-6)
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)


def test_a_crowd_has_the_same_bits(tmp_path, variant):
    """32 at once, in chunks, with the prefix cache and without."""
    runner = load(tiny_embedder.write(tmp_path, variant), kv_cache_memory=8 << 20, **backend("native"))
    prompts = [[*PROMPTS[0][: 30 + i], i] for i in range(28)] + PROMPTS
    alone = [embed(runner, [prompt], enable_prefix_caching=False)[0][0] for prompt in prompts]
    assert len(set(alone)) == 32
    for limits in ({}, {"max_num_batched_tokens": 60, "chunked_prefill_size": 25, "kv_blocks_total": 12}):
        together, statistics = embed(runner, prompts, max_num_seqs=32, **limits)
        assert together == alone
    assert statistics.prefix_cache_hits > 0


def test_bfloat16_is_close(tmp_path, variant, options):
    runner = load(tiny_embedder.write(tmp_path, variant), dtype="bfloat16", kv_cache_memory=4 << 20, **options)
    for found, expected in zip(vectors(embed(runner, PROMPTS)[0]), REFERENCE[variant], strict=True):
        assert np.dot(found, expected) > 0.99


def test_weights_can_be_replaced_by_those_of_another_embedding_model_only(tmp_path):
    runner = load(tiny_embedder.write(tmp_path / "a"), kv_cache_memory=4 << 20)
    (before,) = embed(runner, PROMPTS[:1])[0]
    with pytest.raises(ModelError, match="embeds is False, not True"):
        runner.update_weights(str(tiny_decoders.write(tmp_path / "chat", "qwen3-tied")))
    runner.update_weights(str(tiny_embedder.write(tmp_path / "b", prefix="model.")))
    assert embed(runner, PROMPTS[:1], enable_prefix_caching=False)[0] == [before]


def test_an_embedding_model_has_no_head(tmp_path):
    model = load(tiny_embedder.write(tmp_path), kv_cache_memory=4 << 20).model
    with pytest.raises(InvariantError, match="no head"):
        model.logits(torch.zeros(1, 48))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_vector_without_a_direction_fails_alone(tmp_path, monkeypatch, value):
    runner = load(tiny_embedder.write(tmp_path), kv_cache_memory=4 << 20)
    hidden = torch.ones(2, 48)
    hidden[0] = value
    monkeypatch.setattr(runner.model, "forward", lambda *_: hidden)
    params = resolved_params(EMBEDDING, {}, seed=0)
    entries = [Sequence(i, i, [5], 1, params, frozenset(), block_table=[1 + i]) for i in range(2)]
    failed, row = runner.execute(SchedulerOutput(tuple(ScheduledSequence(entry, 1) for entry in entries)))
    assert failed == RequestFailed(0, 0, "sampling_failed", "the embedding is not finite")
    assert vectors([row.embedding])[0] == pytest.approx([48**-0.5] * 48)


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def test_a_gguf_file_has_the_same_embedding(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", "qwen3-tied", {"pooling_type": 3}, **tiny_embedder.config("qwen3-tied"))
    stored = gguf.GGUFReader(path).fields["qwen3.pooling_type"]
    assert stored.contents() == gguf.PoolingType.LAST == 3
    runner = load(path, kv_cache_memory=8 << 20)
    assert runner.info.embeds
    for found, expected in zip(vectors(embed(runner, PROMPTS)[0]), REFERENCE["qwen3-tied"], strict=True):
        assert found == pytest.approx(expected, abs=2e-6)
