"""Steps that are padded to a few sizes, as CUDA graphs need them: the padding changes no answer."""

import math
import random

import pytest
from helpers import tiny_decoders, tiny_embedder, tiny_llama
from helpers.torch_driver import generate, load, run, spoil

from trioengine.core.errors import ModelError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.batch import Padding, make_batch
from trioengine.worker.runner.cuda_graphs import graph_sizes
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = {"max_num_batched_tokens": 60, "chunked_prefill_size": 25, "kv_blocks_total": 12, "max_num_seqs": 32}


@pytest.fixture(params=["gemma3", "lfm2", "qwen3_5", "qwen3-moe", "olmo2"])
def path(request, tmp_path):
    return tiny_decoders.write(tmp_path, request.param)


@pytest.fixture
def prompts():
    rng = random.Random(0)
    common = tiny_llama.PROMPT[:30]
    return [common + [rng.randrange(200) for _ in range(rng.randrange(1, 60))] for _ in range(11)]


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_a_crowd_beside_padding(path, prompts, options, cache_dtype):
    """With prefix cache and preemption, where the padding's block and states are not finite."""
    config = {"kv_cache_memory": 8 << 20, "kv_cache_dtype": cache_dtype, **options}
    expected, _ = generate(load(path, **config, cuda_graphs="none"), prompts, 30, **LIMITS)
    runner = load(path, **config, cuda_graphs="pad")
    last = runner.info.kv_blocks_total
    assert runner.cache.num_blocks == last + 1
    assert sum(part.nbytes for part in (*runner.cache.layers, *runner.cache.scales)) <= 8 << 20
    runner.cache.layers[0][:, last] = math.nan if cache_dtype == "auto" else 77
    if runner.states is not None:
        for part in runner.states.parts:
            part[PADDING_SLOT] = math.nan
    before = runner.cache.layers[0][:, last].clone()
    found, statistics = generate(runner, prompts, 30, **LIMITS)
    assert found == expected
    assert statistics.num_preemptions > 0
    assert not runner.cache.layers[0][:, last].equal(before), "steps were padded"


def test_a_cache_that_is_not_finite_beside_padding(path, prompts, options):
    """Padding reads nothing but its own block."""
    runner = load(path, kv_cache_memory=8 << 20, **options, cuda_graphs="pad")
    expected, _ = generate(runner, prompts, 12)
    spoil(runner.cache)
    if runner.states is not None:
        spoil(runner.states)
    assert generate(runner, prompts, 12)[0] == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "prompt_logprobs": 1},
        {"temperature": 0.8, "num_speculative_tokens": 5},
    ],
    ids=lambda params: ", ".join(params),
)
def test_every_kind_of_sampling(tmp_path, prompts, options, params):
    path = tiny_decoders.write(tmp_path, "qwen3")
    params = ResolvedParams(seed=5, max_tokens=12, ignore_eos=True, **params)
    expected, found = (
        run(load(path, kv_cache_memory=8 << 20, **options, cuda_graphs=graphs), prompts, params, {})[0]
        for graphs in ("none", "pad")
    )
    assert [sequence.token_ids for sequence in found] == [sequence.token_ids for sequence in expected]


def test_an_embedding_model_is_not_padded(tmp_path):
    runner = load(tiny_embedder.write(tmp_path), kv_cache_memory=4 << 20, cuda_graphs="pad")
    assert runner.cache.num_blocks == runner.info.kv_blocks_total


def test_the_block_of_padding_is_part_of_the_memory(tmp_path):
    """Also in a restart, which has as many blocks as before; without room for it the error names it."""
    path = tiny_decoders.write(tmp_path, "qwen3")
    without = load(path, kv_cache_memory=1 << 20)
    runner = load(path, kv_cache_memory=1 << 20, cuda_graphs="pad")
    assert runner.info.kv_blocks_total == without.info.kv_blocks_total - 1
    again = load(path, kv_blocks=runner.info.kv_blocks_total, cuda_graphs="pad")
    assert again.info.kv_blocks_total == runner.info.kv_blocks_total
    assert again.cache.num_blocks == runner.cache.num_blocks
    one_block = sum(layer[:, :1].nbytes for layer in runner.cache.layers)
    with pytest.raises(ModelError, match="another for padding"):
        load(path, kv_cache_memory=2 * one_block - 1, cuda_graphs="pad")


def test_a_sequence_without_a_slot_gets_no_states_of_padding():
    """All of them get none, and the step of a model with states fails."""
    entries = entry(), entry()
    for number, each in enumerate(entries):
        each.sequence.block_table = [number]
    entries[0].sequence.state_slot = 3
    assert make_batch(SchedulerOutput(entries), 16).states is None
    entries[1].sequence.state_slot = 4
    padded = make_batch(SchedulerOutput(entries), 16, Padding((4,), 9))
    assert padded.states.slots.tolist() == [3, 4, PADDING_SLOT, PADDING_SLOT]


def entry(num_tokens=1, computed=4, **params):
    sequence = Sequence(0, 0, [5] * (computed + num_tokens), 3, ResolvedParams(seed=0, **params), frozenset())
    sequence.num_computed_tokens = computed
    return ScheduledSequence(sequence, num_tokens)


def test_sizes():
    assert graph_sizes(128) == (1, 2, 4, *range(8, 129, 8))
    assert graph_sizes(1) == (1,)
    assert graph_sizes(4) == (1, 2, 4)
    assert graph_sizes(13) == (1, 2, 4, 8, 13)
    assert graph_sizes(2**31)[-1] == 512


def test_steps_of_one_token_a_sequence_are_padded():
    padding = Padding((1, 2, 4, 6), block=9)
    assert [len(padding.rows_for([entry()] * count)) for count in range(1, 9)] == [0, 0, 1, 0, 1, 0, 0, 0]
    (row,) = padding.rows_for([entry()] * 3)
    assert (row.new_token_ids, row.sequence.block_table, row.sequence.state_slot) == ([0], [9], PADDING_SLOT)


def test_other_steps_are_not_padded():
    padding = Padding((4,), block=9)
    assert not padding.rows_for([entry(), entry(num_tokens=2)])
    unfinished = entry()
    unfinished.sequence.token_ids.append(5)
    assert not padding.rows_for([entry(), unfinished])
    scored = entry(computed=1, prompt_logprobs=1)
    assert scored.scores
    assert not padding.rows_for([entry(), scored])
