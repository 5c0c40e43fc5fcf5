"""Greedy answers of Gemma 3 270M in float32: transformers' tokens, and llama.cpp's up to its rounding."""

import pytest
from helpers.torch_driver import generate, load, logprobs_after, reference

CASES = reference("gemma3_reference.json")
LLAMA_CPP = reference("gemma3_llama_cpp.json")
PROMPTS = [case["prompt"] for case in CASES]
ROUNDING = 0.5  # nats; llama.cpp quantizes activations to 8 bits: its own prefill and decoding differ by 0.36


@pytest.fixture(scope="module")
def runner(gemma3, module_on_one_thread):
    return load(gemma3, kv_cache_memory=256 << 20)


@pytest.fixture(scope="module")
def answers(runner):
    """All at once, the longest prompt in chunks."""
    return generate(runner, PROMPTS, 48, max_num_batched_tokens=256)[0]


def test_the_answers_are_transformers(answers):
    assert max(map(len, PROMPTS)) > 512  # the window
    assert answers == [case["output"] for case in CASES]


def test_the_answers_part_from_llama_cpps_where_its_rounding_decides(runner, answers):
    gaps = {}
    for case, ours in zip(LLAMA_CPP, answers, strict=True):
        pairs = enumerate(zip(ours, case["output"], strict=True))
        for at, (our, their) in pairs:
            if our != their:
                logprobs = logprobs_after(runner, [*case["prompt"], *ours[:at]])
                gaps[case["text"]] = float(logprobs[our] - logprobs[their])
                break
    assert {text: gap for text, gap in gaps.items() if not 0 < gap <= ROUNDING} == {}
