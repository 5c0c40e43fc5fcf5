"""A sequence's logits and tokens have the same bits alone and in any company, however the work is cut."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from helpers.torch_driver import load, needs_compiler, reference

from trioengine.core.errors import ModelError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.runner.sampling import sample
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


@dataclass
class Answer:
    """All that was computed for a request, in the order of its tokens."""

    logits: list = field(default_factory=list)  # the bits of each sampled row
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)


PARAMS = (
    ResolvedParams(temperature=0.0, ignore_eos=True, seed=1, logprobs=3),
    ResolvedParams(temperature=1.0, ignore_eos=True, seed=2, logprobs=3),
    ResolvedParams(temperature=0.7, ignore_eos=True, seed=3, top_p=0.9, top_k=40, logprobs=3),
)


def answers(runner, prompts, lengths, **limits):
    """Run all prompts at once; prompt i has PARAMS[i % 3], and lengths[i] tokens of answer."""
    limits = {
        "vocab_size": runner.info.vocab_size,
        "max_model_len": runner.info.max_model_len,
        "kv_blocks_total": runner.info.kv_blocks_total,
        "block_size": runner.info.block_size,
        "state_slots": runner.info.state_slots,
        "windows": runner.info.windows,
        **limits,
    }
    scheduler, found = Scheduler(Limits(**limits)), [Answer() for _ in prompts]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if prompt is not None:
            params = ResolvedParams(**{**vars_of(PARAMS[i % len(PARAMS)]), "max_tokens": length})
            scheduler.add(Sequence(i, i, list(prompt), len(prompt), params, frozenset()))
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.update(output, step(runner, output, found))
    return found, scheduler.statistics(0)


def vars_of(params):
    return {name: getattr(params, name) for name in ("temperature", "ignore_eos", "seed", "top_p", "top_k", "logprobs")}


def step(runner, output, found):
    """As the runner's own `execute`, with a look at the logits."""
    with torch.inference_mode():
        runner.cache.copy_blocks(output.copies)
        if runner.states is not None:
            runner.states.copy(output.state_copies)
        batch = make_batch(output, runner.info.block_size)
        hidden = runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache), runner.states)
        logits = runner.model.logits(hidden)
        sampled = sample(logits, [entry.sequence for entry in output.scheduled if entry.samples])
    for row, token in zip(logits, sampled, strict=True):
        answer = found[token.request]
        answer.logits.append(row.view(torch.uint8).numpy().tobytes())
        answer.tokens += token.token_ids
        answer.logprobs.append(token.logprobs)
    return sampled


def alone(runner, prompts, lengths):
    """Each prompt by itself, in whole."""
    results = []
    for i in range(len(prompts)):
        only = [prompt if i == j else None for j, prompt in enumerate(prompts)]
        results.append(answers(runner, only, lengths, enable_prefix_caching=False)[0][i])
    return results


def same(found, expected):
    """Not compared by pytest, whose report of so many bytes takes minutes."""
    return found == expected


def check(runner, prompts, lengths, chunks=(1, 7, 33)):
    """The same answers in all ways to compute them, each of which takes place."""
    expected = alone(runner, prompts, lengths)
    total = sum(len(prompt) for prompt in prompts)
    whole, _ = answers(runner, prompts, lengths, max_num_batched_tokens=total, chunked_prefill_size=total)
    assert same(whole, expected)
    for chunk in chunks:
        found, _ = answers(runner, prompts, lengths, chunked_prefill_size=chunk, max_num_batched_tokens=chunk + 128)
        assert same(found, expected)
    found, statistics = answers(runner, prompts + prompts, [*lengths, *lengths], max_num_seqs=len(prompts))
    assert same(found[: len(prompts)], expected)
    assert statistics.prefix_cache_hits > 0


def check_preemption(runner, prompts, lengths):
    """Also of those that are computed twice."""
    expected = alone(runner, prompts, lengths)
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    blocks = -(-longest // runner.info.block_size) + 1
    found, statistics = answers(runner, prompts, lengths, kv_blocks_total=blocks, enable_prefix_caching=False)
    assert same(found, expected)
    assert statistics.num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["plain", "tied", "llama3", "bias"])
def test_tiny_checkpoints(tiny_llama, tmp_path, one_thread, variant, dtype):
    path = tiny_llama.write(tmp_path / variant, variant, hidden_size=96, intermediate_size=2048)
    runner = load(path, dtype)
    rng = random.Random(variant)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in (90, 17, 1, 2, 40, 33, 16, 40, 17)]
    lengths = [29, 30, 18, 19, 25, 17, 26, 24, 20]
    check(runner, prompts, lengths)
    check_preemption(runner, prompts, lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(smollm2, one_thread, dtype):
    runner = load(smollm2, dtype, kv_cache_memory=128 << 20)
    rng = random.Random(0)
    prompts = [case["prompt"] for case in reference("reference.json")][:3]
    prompts.append([rng.randrange(100, 49_000) for _ in range(70)])
    check(runner, prompts, [9, 7, 8, 9], chunks=(50,))
    check_preemption(runner, prompts, [17, 18, 17, 19])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_threads(path, prompt, dtype):
    """The same bits with each number."""
    prompts, lengths = [prompt, prompt[5:22], [3], [4, 5]], [5, 9, 8, 7]
    threads = torch.get_num_threads()
    try:
        expected, _ = answers(load(path, dtype, num_threads=1), prompts, lengths)
        for number in (2, 3):
            runner = load(path, dtype, num_threads=number)
            check(runner, prompts, lengths, chunks=(33,))
            assert same(answers(runner, prompts, lengths)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_torch_kernels_are_refused(path):
    with pytest.raises(ModelError, match="batch_invariant needs the native kernels, and the torch kernels are in use"):
        load(path, kernels="torch", batch_invariant=True)
