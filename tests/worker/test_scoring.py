"""Logprobs of prompts on tiny checkpoints: the sampler's for the same prefixes, however the prefill is cut."""

import math

import pytest
import torch
from helpers.torch_driver import load, logprobs_after, reference

from trioengine.core.messages import RequestFailed
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.runner import scoring
from trioengine.worker.scheduling import step_plan as steps
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence

VARIANTS = reference("tiny_reference.json")
SCORED = ResolvedParams(temperature=0.0, max_tokens=0, seed=0, prompt_logprobs=3)


@pytest.fixture
def path(tiny_llama, tmp_path):
    return tiny_llama.write(tmp_path, "plain")


@pytest.fixture
def expected(path):
    """Log-probabilities of the sampler, which test_torch_runner compares with transformers: each prefix alone."""
    runner = load(path, kv_cache_memory=4 << 20)
    known = {}

    def of(prompt):
        prefixes = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        for prefix in prefixes:
            if prefix not in known:
                known[prefix] = logprobs_after(runner, prefix)
        return [known[prefix] for prefix in prefixes]

    return of


def new_scheduler(runner, **limits):
    info = runner.info
    values = {
        "vocab_size": info.vocab_size,
        "max_model_len": info.max_model_len,
        "kv_blocks_total": info.kv_blocks_total,
        "block_size": info.block_size,
    }
    return Scheduler(Limits(**(values | limits)))


def run(runner, prompts, params=SCORED, **limits):
    """The logprobs of each prompt from its second token on, its answer, and the scheduler's statistics."""
    return run_by(new_scheduler(runner, **limits), runner, prompts, params)


def run_by(scheduler, runner, prompts, params=SCORED):
    sequences = [Sequence(i, i, list(prompt), len(prompt), params, frozenset()) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    found = [[] for _ in prompts]
    while scheduler.has_work:
        output = scheduler.schedule()
        assert sum(len(entry.scores) for entry in output.scheduled) <= steps.MAX_SCORES
        rows = runner.execute(output)
        scheduler.update(output, rows)
        for row in rows:
            found[row.request] += row.prompt_logprobs or ()
    scheduler.check_integrity()
    answers = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
    return found, answers, scheduler.statistics(0)


def check(found, prompt, expected, top=3):
    assert len(found) == len(prompt) - 1
    for entry, token, scores in zip(found, prompt[1:], expected, strict=False):
        assert next(iter(entry)) == token
        best = scores.topk(top).indices.tolist()
        assert set(entry) == {token, *best}
        for each, logprob in entry.items():
            assert logprob == pytest.approx(float(scores[each]), abs=1e-4)


LIMITS = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "single tokens": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "without a cache": {"enable_prefix_caching": False, "chunked_prefill_size": 20},
}


@pytest.mark.parametrize("name", LIMITS)
def test_they_are_those_of_each_prefix(tiny_llama, path, expected, name):
    """Eight at once, many of which share their beginnings; none is found in the cache."""
    runner = load(path, kv_cache_memory=4 << 20)
    prompts = [tiny_llama.PROMPT[: 90 - count] for count in range(7)] + [[5]]
    found, answers, statistics = run(runner, prompts, **LIMITS[name])
    for each, prompt in zip(found, prompts, strict=True):
        check(each, prompt, expected(prompt))
    assert answers == [[]] * 8
    assert statistics.prefix_cache_hits == 0
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (sum(map(len, prompts)), 0)


CUTS = [*((variant, "chunks") for variant in VARIANTS), *(("plain", name) for name in LIMITS if name != "chunks")]


@pytest.mark.parametrize(("variant", "name"), CUTS)
def test_they_are_those_of_transformers(tiny_llama, tmp_path, device, variant, name):
    """Before and after the prompt is in the prefix cache, which answers without scores take it from."""
    runner = load(tiny_llama.write(tmp_path, variant), kv_cache_memory=4 << 20, device=device)
    scheduler = new_scheduler(runner, **LIMITS[name])
    known, prompt = VARIANTS[variant], tiny_llama.PROMPT
    answered = ResolvedParams(temperature=0.0, max_tokens=2, seed=0, ignore_eos=True)
    for _ in range(2):
        (scores,), _, _ = run_by(scheduler, runner, [prompt])
        assert [entry[token] for entry, token in zip(scores, prompt[1:], strict=True)] == pytest.approx(
            known["prompt_logprobs"], abs=1e-4
        )
        assert [max(entry.values()) for entry in scores] == pytest.approx(known["best_logprobs"], abs=1e-4)
        _, (answer,), statistics = run_by(scheduler, runner, [prompt], answered)
        assert answer == known["output"][:2]
        assert (statistics.prefix_cache_hits > 0) == (name != "without a cache")


def test_logits_are_computed_in_slices(tiny_llama, path, expected, monkeypatch):
    runner = load(path, kv_cache_memory=4 << 20)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 10 * runner.info.vocab_size)
    num_rows = []
    logits = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: num_rows.append(len(hidden)) or logits(hidden))
    ((found,), _, _) = run(runner, [tiny_llama.PROMPT])
    check(found, tiny_llama.PROMPT, expected(tiny_llama.PROMPT))
    assert num_rows == [1, *[10] * 8, 9]


def test_a_step_has_a_bounded_number(tiny_llama, path, expected, monkeypatch):
    monkeypatch.setattr(steps, "MAX_SCORES", 13)
    prompts = [tiny_llama.PROMPT, tiny_llama.PROMPT[:14], tiny_llama.PROMPT[:15], tiny_llama.PROMPT[3:40]]
    found, _, _ = run(load(path, kv_cache_memory=4 << 20), prompts)
    for each, prompt in zip(found, prompts, strict=True):
        check(each, prompt, expected(prompt))


def test_preempted_and_with_answers(tiny_llama, path, expected, device):
    """Each token's logprobs come once; the answers are those without logprobs."""
    runner = load(path, kv_cache_memory=4 << 20, block_size=4, device=device)
    prompts = [tiny_llama.PROMPT[start : start + 20] for start in range(8)]
    limits = {"kv_blocks_total": 30, "chunked_prefill_size": 9, "max_num_batched_tokens": 40}
    greedy = {"temperature": 0.0, "max_tokens": 20, "seed": 0, "ignore_eos": True}
    _, alone, _ = run(runner, prompts, ResolvedParams(**greedy), enable_prefix_caching=False)
    found, answers, statistics = run(runner, prompts, ResolvedParams(**greedy, prompt_logprobs=3), **limits)
    assert statistics.num_preemptions > 0
    assert answers == alone
    for each, prompt in zip(found, prompts, strict=True):
        check(each, prompt, expected(prompt))


def test_logits_that_are_not_finite_fail_alone(tiny_llama, path, device):
    """Also in the middle of a prompt, whose rest is not computed."""
    runner = load(path, kv_cache_memory=4 << 20, device=device)
    with torch.inference_mode():
        runner.model._embedding[198] = math.nan
    bad = Sequence(0, 0, [198, *tiny_llama.PROMPT], 91, SCORED, frozenset())
    good = Sequence(1, 1, [3, 4, 5], 3, SCORED, frozenset())
    info = runner.info
    limits = Limits(info.vocab_size, info.max_model_len, info.kv_blocks_total, info.block_size, chunked_prefill_size=9)
    scheduler = Scheduler(limits)
    scheduler.add(bad)
    scheduler.add(good)
    rows = []
    while scheduler.has_work:
        output = scheduler.schedule()
        rows += runner.execute(output)
        scheduler.update(output, rows[-1:])
    assert rows[0] == RequestFailed(0, 0, "sampling_failed", "logits are not finite")
    (row,) = rows[1:]
    assert (row.request, row.finish_reason, len(row.prompt_logprobs), len(row.token_ids)) == (1, "length", 2, 0)
    scheduler.check_integrity()


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_prompt_may_fill_the_context(tiny_llama, path, expected, chunk):
    """And the whole KV cache, which such a context is cut to."""
    runner = load(path, kv_cache_memory=4 << 20)
    prompt = (tiny_llama.PROMPT * 2)[: 2 * runner.info.block_size]
    limits = {"max_model_len": len(prompt), "kv_blocks_total": 2, "max_num_batched_tokens": chunk}
    (found,), answers, _ = run(runner, [prompt], **limits)
    check(found, prompt, expected(prompt))
    assert answers == [[]]
