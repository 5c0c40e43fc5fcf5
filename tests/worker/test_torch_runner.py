"""The torch runner on tiny checkpoints: against transformers, against itself in pieces, and where it must refuse."""

import itertools
import math
import random

import pytest
import torch
from helpers.torch_driver import generate, kv_parts, load, reference, spoil

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.kv_cache import KVCache, KVLayout, KVOrder
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.runner.model_spec import choose_device, choose_dtype
from trioengine.worker.scheduling.sequence import BlockCopy, ScheduledSequence, SchedulerOutput, Sequence

VARIANTS = reference("tiny_reference.json")
GREEDY = ResolvedParams(temperature=0.0, seed=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def runner(tiny_llama, tmp_path, variant, options):
    return load(tiny_llama.write(tmp_path, variant), kv_cache_memory=4 << 20, **options)


@pytest.mark.parametrize("budget", [2048, 33, 7, 1])
def test_greedy_is_that_of_transformers(tiny_llama, runner, variant, budget):
    params = ResolvedParams(temperature=0.0, max_tokens=48, seed=0, ignore_eos=True, logprobs=0)
    answers, _ = generate(runner, [tiny_llama.PROMPT], 48, params, max_num_batched_tokens=budget, max_num_seqs=1)
    assert answers == [VARIANTS[variant]["output"]]


def test_logprob_is_that_of_transformers(tiny_llama, runner, variant):
    sequence = Sequence(
        0, 0, list(tiny_llama.PROMPT), 90, ResolvedParams(temperature=0.0, seed=0, logprobs=0), frozenset()
    )
    sequence.block_table = [3, 1, 4, 2, 9, 6]
    (token,) = runner.execute(SchedulerOutput((ScheduledSequence(sequence, 90),)))
    assert token.logprobs[0] == pytest.approx({VARIANTS[variant]["output"][0]: VARIANTS[variant]["logprob"]}, abs=1e-4)


@pytest.mark.parametrize("pieces", [(90,), (60, 30), (89, 1)], ids=str)
def test_a_cache_of_8_bits(tiny_llama, tmp_path, variant, options, pieces):
    """Nearly as exact, for a prompt in chunks and for a single token, in a third of the memory."""
    runner = load(tiny_llama.write(tmp_path, variant), kv_cache_memory=1 << 20, kv_cache_dtype="int8", **options)
    model = runner.target.spec.model.text
    per_block = 2 * model.num_layers * model.num_kv_heads * (model.head_dim + 4) * 16
    num_blocks = (1 << 20) // per_block - (runner.target.padding is not None)
    assert (runner.info.kv_blocks_total, runner.info.kv_cache_dtype) == (num_blocks, "int8")
    assert sum(tensor.nbytes for tensor in (*runner.cache.layers, *runner.cache.scales)) <= 1 << 20
    params = ResolvedParams(temperature=0.0, seed=0, logprobs=0)
    sequence = Sequence(0, 0, list(tiny_llama.PROMPT), 90, params, frozenset(), block_table=[3, 1, 4, 2, 9, 6])
    for piece in pieces:
        rows = runner.execute(SchedulerOutput((ScheduledSequence(sequence, piece),)))
        sequence.num_computed_tokens += piece
    expected = {VARIANTS[variant]["output"][0]: VARIANTS[variant]["logprob"]}
    assert rows[0].logprobs[0] == pytest.approx(expected, abs=0.05)


def test_batches_of_every_kind(tiny_llama, tmp_path, options):
    """Lengths of every kind together, with prefix cache and preemption: each answer is the one it has alone."""
    runner = load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=4 << 20, block_size=4, **options)
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(rng.choice([1, 2, 3, 4, 5, 30, 70]))] for _ in range(24)]
    prompts += [prompts[-1] + [5], prompts[-1] + [6, 7]]
    alone = [generate(runner, [prompt], 20, enable_prefix_caching=False)[0][0] for prompt in prompts]
    limits = {"max_num_batched_tokens": 50, "chunked_prefill_size": 20, "max_num_seqs": 20, "kv_blocks_total": 80}
    together, statistics = generate(runner, prompts, 20, **limits)
    assert together == alone
    assert statistics.num_preemptions > 0


@pytest.mark.parametrize("num_shared", [1, 15, 16, 30, 47])
def test_what_a_prompt_shares_with_one_before_is_copied(tiny_llama, tmp_path, device, num_shared):
    """Also within a block, which is copied: the answer is the one without a cache."""
    runner = load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=4 << 20, device=device)
    first = tiny_llama.PROMPT[:60]
    second = [*first[:num_shared], first[num_shared] + 1, *tiny_llama.PROMPT[:9]]
    alone = [generate(runner, [prompt], 20, enable_prefix_caching=False)[0][0] for prompt in (first, second)]
    together, statistics = generate(runner, [first, second], 20, max_num_seqs=1)
    assert together == alone
    assert statistics.prefix_cache_hits == num_shared


def test_bfloat16_runs(tiny_llama, tmp_path, options):
    runner = load(tiny_llama.write(tmp_path, "plain"), dtype="bfloat16", kv_cache_memory=4 << 20, **options)
    answers, _ = generate(runner, [tiny_llama.PROMPT, tiny_llama.PROMPT[:5]], 8)
    assert [len(answer) for answer in answers] == [8, 8]
    assert answers[0][0] == VARIANTS["plain"]["output"][0]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_lay_in_a_block_does_not_matter(tiny_llama, tmp_path, options, kv_cache_dtype):
    """A sequence that went bad leaves nan in its blocks; the next ones there, and its neighbours, do not see it."""
    path = tiny_llama.write(tmp_path, "plain")
    runner = load(path, kv_cache_memory=4 << 20, kv_cache_dtype=kv_cache_dtype, **options)
    prompts = [tiny_llama.PROMPT, tiny_llama.PROMPT[:3], tiny_llama.PROMPT[:17]]
    with torch.inference_mode():
        for tensor in (*runner.cache.layers, *runner.cache.scales):
            tensor.zero_()
        expected, _ = generate(runner, prompts, 48)
        spoil(runner.cache)
    answers, _ = generate(runner, prompts, 48)
    assert answers == expected
    assert kv_cache_dtype == "int8" or answers[0] == VARIANTS["plain"]["output"]


def test_a_bad_row_fails_alone(tiny_llama, tmp_path, options):
    """Weights of one token are nan: who uses it fails, who does not goes on."""
    runner = load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=4 << 20, **options)
    with torch.inference_mode():
        runner.model._embedding[198] = math.nan
    good = Sequence(0, 10, list(tiny_llama.PROMPT), 90, GREEDY, frozenset(), block_table=[0, 1, 2, 3, 4, 5])
    bad = Sequence(1, 11, [198, 3], 2, GREEDY, frozenset(), block_table=[6])
    good_token, bad_token = runner.execute(SchedulerOutput((ScheduledSequence(good, 90), ScheduledSequence(bad, 2))))
    assert isinstance(good_token, TokensRow)
    assert (good_token.request, good_token.token_ids[0]) == (10, VARIANTS["plain"]["output"][0])
    assert bad_token == RequestFailed(1, 11, "sampling_failed", "logits are not finite")


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_block_is_copied_as_far_as_it_is_shared(dtype, order):
    """What lies behind may be not finite, and is read under a mask. All is read before any of it is written."""
    cache = KVCache(KVLayout(dtype, 4, 2, 6, order), 4, 2, torch.device("cpu"))
    spoil(cache)
    for scales in cache.scales:
        scales[:, 0, :, :2], scales[:, 1, :, :1] = 0.5, 0.25
    spoilt = cache.layers[0][0, 3].clone()
    parts = [part for layer in range(2) for part in kv_parts(cache, layer)]
    for part, places in parts:
        part[0, :, places[:2].flatten()] = 1
        part[1, :, places[0]] = 2
    cache.copy_blocks([BlockCopy(0, 1, 2), BlockCopy(1, 2, 1), BlockCopy(0, 0, 1)])
    for part, places in parts:
        for head, element in itertools.product(range(2), range(6)):
            assert part[:3, head, places[:, element]].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [2, 0, 0, 0]]
        assert torch.equal(part[3], spoilt) or part[3].isnan().all()
    for half in (half for scales in cache.scales for half in scales):
        assert half[:3, 1].tolist() == [[0.5, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0, 0, 0]]


def test_the_order_of_a_block():
    """Of 2 tokens with 4 elements: the place of each token's elements."""
    rows, transposed, pairs = (
        [places.tolist() for places in KVLayout(torch.bfloat16, 2, 1, 4, order).places()] for order in KVOrder
    )
    assert rows == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    assert transposed == [[[0, 2, 4, 6], [1, 3, 5, 7]], rows[1]]
    assert pairs == [[[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]]


def test_a_step_without_samples(tiny_llama, tmp_path):
    runner = load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=4 << 20)
    sequence = Sequence(0, 0, list(tiny_llama.PROMPT), 90, GREEDY, frozenset(), block_table=[0, 1])
    assert runner.execute(SchedulerOutput((ScheduledSequence(sequence, 20),))) == []


def test_what_the_runner_says_of_itself(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path, "plain")
    progress = []
    config = WorkerConfig(str(path), device="cpu", dtype="float32", kv_cache_memory=1 << 20, max_model_len=100)
    runner = TorchModelRunner.load(config, lambda done, total: progress.append((done, total)))
    per_block = 2 * 3 * 2 * 8 * 4 * 16  # keys and values, layers, heads, head size, float32, tokens
    assert runner.info.kv_blocks_total == (1 << 20) // per_block
    assert (runner.info.model_type, runner.info.device, runner.info.dtype) == ("llama", "cpu", "float32")
    assert (runner.info.vocab_size, runner.info.max_model_len, runner.info.block_size) == (200, 100, 16)
    assert runner.info.kv_cache_dtype == "float32"
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1] == sum(t.nbytes for t in tiny_llama.tensors(tiny_llama.BASE).values())
    assert load(path, kv_cache_memory=3 * per_block).info.max_model_len == 48  # what the cache holds
    assert load(path).info.max_model_len == 256  # the model's own
    assert load(path, kv_cache_memory=None).info.kv_blocks_total > 0


def test_kv_cache_memory_that_holds_no_block(tiny_llama, tmp_path):
    with pytest.raises(ModelError, match=r"kv_cache_memory \(--kv-cache-memory\) is too small: 100 bytes"):
        load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=100)


def test_devices_and_dtypes():
    cpu = torch.device("cpu")
    assert choose_dtype("float32", cpu) is torch.float32
    assert choose_dtype("bfloat16", cpu) is torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    with pytest.raises(ModelError, match=r"cuda:99: .*; choose the device cpu or auto"):
        choose_device("cuda:99")


def test_memory_that_cannot_be_had(tiny_llama, tmp_path, device):
    message = rf"\d{{17}} bytes for the KV cache cannot be had on {device}: lower kv_cache_memory"
    with pytest.raises(ModelError, match=message):
        load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=10**17, device=device)
