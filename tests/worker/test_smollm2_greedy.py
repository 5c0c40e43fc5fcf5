"""Greedy in float32: token for token what transformers says, however the work is cut."""

import pytest
from helpers.torch_driver import generate, load, reference

CASES = reference("reference.json")
PROMPTS = [case["prompt"] for case in CASES]
ANSWERS = [case["output"] for case in CASES]


@pytest.fixture(scope="module")
def runner(smollm2):
    return load(smollm2, kv_cache_memory=256 << 20)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_alone(runner, index):
    assert generate(runner, [PROMPTS[index]], 64)[0] == [ANSWERS[index]]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_32_at_once(runner, enable_prefix_caching):
    answers, statistics = generate(
        runner, PROMPTS + PROMPTS[:12], 64, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=512
    )
    assert answers == ANSWERS + ANSWERS[:12]
    assert (statistics.prefix_cache_hits > 0) is enable_prefix_caching


def test_prefill_in_chunks_of_64(runner):
    assert generate(runner, PROMPTS, 64, max_num_batched_tokens=64, max_num_seqs=32)[0] == ANSWERS


def test_preemption(runner):
    answers, statistics = generate(runner, PROMPTS, 64, kv_blocks_total=60)
    assert answers == ANSWERS
    assert statistics.num_preemptions > 0
