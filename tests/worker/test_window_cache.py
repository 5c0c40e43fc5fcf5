"""Layers with windows and blocks of their own: the same answers as with all blocks, in less memory."""

import random

import pytest
from helpers import tiny_decoders
from helpers.torch_driver import generate as generate_by
from helpers.torch_driver import load, spoil

from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.scheduling.sequence import NO_WINDOWS, Limits, Windows

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = {"gemma3": 5, "mistral-window": 33, "qwen3-window": 24}  # windows
CONTEXT = 400
SIZES = {"max_model_len": CONTEXT, "max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": 16}


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


@pytest.fixture
def path(tmp_path, model):
    return tiny_decoders.write(tmp_path, model, max_position_embeddings=CONTEXT)


def generate(runner, asked, max_tokens, params=None, **limits):
    return generate_by(runner, asked, max_tokens, params, max_num_batched_tokens=64, **limits)


def prompts(count, length):
    rng = random.Random(count)
    return [[rng.randrange(200) for _ in range(length - 7 * number)] for number in range(count)]


def windows_of(runner):
    return [layer.shape[1] for layer in runner.cache.layers]


def expected(path, asked, options, **params):
    """Answers with all blocks in the KV cache: of padded steps."""
    runner = load(path, kv_cache_memory=16 << 20, cuda_graphs="pad", **SIZES, **options)
    assert runner.info.windows == NO_WINDOWS
    return generate(runner, asked, 40, **params)[0]


def test_answers_are_the_same(path, model, options):
    """In chunks, behind a prefix, preempted, and with nothing to read in blocks that are not written."""
    common = prompts(1, 120)[0]
    asked = [*prompts(3, 200), [*common, 1, 2], [*common, 3], common[:90]]
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    assert runner.info.windows.size >= MODELS[model]
    spoil(runner.cache)
    limits = {"chunked_prefill_size": 48}
    answers, statistics = generate(runner, asked, 40, **limits)
    assert answers == expected(path, asked, options)
    assert statistics.prefix_cache_hits >= 80
    answers, statistics = generate(runner, asked, 40, **limits, kv_blocks_total=28)
    assert answers == expected(path, asked, options)
    assert statistics.num_preemptions > 0


def test_int8_answers_are_the_same(path, options):
    asked, options = prompts(3, 200), options | {"kv_cache_dtype": "int8"}
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    spoil(runner.cache)
    assert generate(runner, asked, 40)[0] == expected(path, asked, options)


def test_memory(path, model, options):
    """As many blocks of windows as the sequences of a step see; the rest of the memory is for the other layers."""
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    text, window = runner.target.spec.model.text, max(size for size in runner.target.spec.model.text.windows if size)
    in_windows = 2 * (2 + -(-window // 16)) + -(-(64 + 15) // 16)
    assert runner.info.windows == Windows(window, in_windows)
    per_layer = runner.target.spec.layout.token_bytes * 16
    num_windowed = sum(size is not None for size in text.windows)
    num_full = text.num_layers - num_windowed
    left = (16 << 20) - in_windows * num_windowed * per_layer
    as_windows = (16 << 20) // (num_windowed * per_layer)
    total = left // (num_full * per_layer) if num_full else max(as_windows, in_windows * 16 // window * CONTEXT // 16)
    assert runner.info.kv_blocks_total == total
    assert runner.info.max_model_len == CONTEXT
    assert windows_of(runner) == [total if size is None else in_windows for size in text.windows]


def test_little_memory(path, options):
    """Blocks of windows are no more than the others, with which a sequence has them."""
    runner = load(path, kv_cache_memory=70_000, **SIZES, **options)
    blocks = runner.info.kv_blocks_total
    assert runner.info.windows.num_blocks == blocks < 8
    assert runner.info.max_model_len == 16 * blocks
    asked = [prompt[: 16 * blocks - 20] for prompt in prompts(3, 120)]
    assert generate(runner, asked, 20)[0] == [answer[:20] for answer in expected(path, asked, options)]


def test_a_restart_has_as_many(path, options):
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    sizes = {"kv_blocks": runner.info.kv_blocks_total, "window_blocks": runner.info.windows.num_blocks}
    again = load(path, **sizes, **SIZES, **options)
    assert again.info == runner.info
    assert windows_of(again) == windows_of(runner)


@pytest.mark.parametrize("memory", [30_000, 70_000, 150_000, 400_000, 3_000_000])
def test_a_restart_after_any_memory(path, memory, options):
    """The limits of scheduling hold, and are the same in a worker that comes later."""
    info = load(path, kv_cache_memory=memory, **SIZES, **options).info
    sizes = {"kv_blocks": info.kv_blocks_total, "window_blocks": info.windows.num_blocks}
    again = load(path, **sizes, **{**SIZES, "max_model_len": info.max_model_len}, **options).info
    assert again == info
    Limits(info.vocab_size, info.max_model_len, info.kv_blocks_total, 16, 2, 64, windows=info.windows)


def test_sleep_and_wake(path, options):
    asked = prompts(2, 150)
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    before = generate(runner, asked, 30)[0]
    runner.sleep()
    runner.wake(ALL_TAGS)
    spoil(runner.cache)
    assert generate(runner, asked, 30)[0] == before


@pytest.mark.parametrize("context", [20, 33])
def test_a_context_within_the_window_needs_no_blocks_of_windows(tmp_path, context, options):
    path = tiny_decoders.write(tmp_path, "mistral-window")
    runner = load(path, kv_cache_memory=1 << 20, **{**SIZES, "max_model_len": context}, **options)
    assert runner.info.windows == NO_WINDOWS


def test_drafts(path, options):
    """Prompt lookup in text that repeats itself: drafts are verified behind the window as well."""
    asked = [prompts(1, 40)[0] * 4]
    params = ResolvedParams(temperature=0.0, max_tokens=40, seed=0, ignore_eos=True, num_speculative_tokens=8)
    runner = load(path, kv_cache_memory=16 << 20, **SIZES, **options)
    answers, statistics = generate(runner, asked, 40, params)
    assert answers == expected(path, asked, options)
    assert statistics.draft_tokens > 0


def test_a_draft_model_has_all_blocks(tmp_path, path, model, options):
    asked = prompts(2, 150)
    params = ResolvedParams(temperature=0.0, max_tokens=40, seed=0, ignore_eos=True, num_speculative_tokens=4)
    (tmp_path / "draft").mkdir()
    draft = tiny_decoders.write(tmp_path / "draft", model, max_position_embeddings=CONTEXT)
    runner = load(path, kv_cache_memory=16 << 20, draft_model_path=str(draft), **SIZES, **options)
    assert runner.info.windows != NO_WINDOWS
    assert {layer.shape[1] for layer in runner.draft_model.loaded.cache.layers} == {runner.info.kv_blocks_total}
    answers, statistics = generate(runner, asked, 40, params)
    assert answers == expected(path, asked, options)
    assert statistics.accepted_tokens > 20
