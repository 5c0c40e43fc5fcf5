"""A draft model: the same answers as without, in fewer steps, from the same blocks."""

import pytest
import torch
from helpers import tiny_decoders, tiny_embedder
from helpers.sleeping_runner import EXPECTED, KV_BYTES, KV_CACHE, WEIGHTS, asleep, fall_asleep
from helpers.torch_driver import backend, generate, kv_parts, load, run, spoil

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import BlockCopy, Limits, ScheduledSequence, SchedulerOutput, Sequence

SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 3}
GREEDY = ResolvedParams(temperature=0.0, max_tokens=48, seed=0, ignore_eos=True, num_speculative_tokens=15)


@pytest.fixture
def small(tiny_llama, tmp_path):
    """A smaller model of the same vocabulary."""
    return tiny_llama.write(tmp_path / "small", "plain", num_key_value_heads=1, **SMALL)


def drafted(runner, prompts, **limits):
    """Greedy answers with speculation, and the statistics."""
    sequences, _, statistics = run(runner, prompts, GREEDY, limits)
    return [sequence.output for sequence in sequences], statistics


@pytest.fixture(params=["native", "torch", "cuda"])
def kernels(request):
    return backend(request.param)


def test_a_model_drafts_for_itself(path, prompt, kernels):
    """All drafts are kept, but for a last one that the blocks or the answer cut short."""
    runner = load(path, draft_model_path=str(path), **kernels)
    (output,), statistics = drafted(runner, [prompt])
    assert output == EXPECTED
    assert statistics.accepted_tokens == statistics.draft_tokens > 36
    assert statistics.num_steps == 48 - statistics.accepted_tokens


def test_a_smaller_model_changes_no_answer(path, small, prompt, kernels):
    """Its drafts are wrong, mostly."""
    runner = load(path, draft_model_path=str(small), **kernels)
    (output,), statistics = drafted(runner, [prompt])
    assert output == EXPECTED
    assert 0 < statistics.draft_tokens > statistics.accepted_tokens


def test_several_sequences_share_the_passes(path, prompt):
    runner = load(path, draft_model_path=str(path))
    prompts = [prompt[start:] for start in range(0, 60, 20)]
    alone = [generate(runner, [each], 48)[0][0] for each in prompts]
    passes = []
    draft_step = runner.draft_model._append
    runner.draft_model._append = lambda sequences: passes.append(len(sequences)) or draft_step(sequences)
    outputs, statistics = drafted(runner, prompts)
    assert outputs == alone
    assert statistics.accepted_tokens == statistics.draft_tokens == sum(passes)
    assert max(passes) == 3 and len(passes) < statistics.draft_tokens / 2


def test_drafts_behind_a_prefix_and_a_preemption(path, prompt):
    """The draft model has keys and values wherever the model has them."""
    runner = load(path, draft_model_path=str(path))
    for loaded in (runner.target, runner.draft_model.loaded):
        spoil(loaded.cache)
    prompts = [prompt, prompt[:50], [*prompt[:37], 3, 4]]
    expected = [generate(runner, [each], 48)[0][0] for each in prompts]
    outputs, statistics = drafted(runner, prompts, kv_blocks_total=13, chunked_prefill_size=9)
    assert outputs == expected
    assert statistics.num_preemptions > 0 and statistics.prefix_cache_hits > 0
    assert statistics.accepted_tokens == statistics.draft_tokens > 20


def test_blocks_are_copied_in_both_models(path, small):
    runner = load(path, draft_model_path=str(small), block_size=16)
    sequence = Sequence(0, 0, [5] * 3, 3, GREEDY, frozenset(), block_table=[0])
    for loaded in (runner.target, runner.draft_model.loaded):
        spoil(loaded.cache)
    runner.execute(SchedulerOutput((ScheduledSequence(sequence, 3),)))
    other = Sequence(1, 1, [7], 1, GREEDY, frozenset(), block_table=[2])
    runner.execute(SchedulerOutput((ScheduledSequence(other, 1),), copies=(BlockCopy(0, 1, 2),)))
    for loaded in (runner.target, runner.draft_model.loaded):
        for layer in range(len(loaded.cache.layers)):
            for part, places in kv_parts(loaded.cache, layer):
                assert torch.equal(part[1][:, places[:2]], part[0][:, places[:2]])
                assert not part[1][:, places[2:]].any()


def test_the_memory_is_for_the_blocks_of_both(path, small):
    plain = load(path, kv_cache_memory=KV_BYTES)
    both = load(path, kv_cache_memory=KV_BYTES, draft_model_path=str(small))
    per_block = [loaded.spec.block_bytes() for loaded in (both.target, both.draft_model.loaded)]
    assert both.info.kv_blocks_total == KV_BYTES // sum(per_block) < plain.info.kv_blocks_total
    assert both.draft_model.loaded.cache.num_blocks == both.info.kv_blocks_total
    assert load(path, kv_blocks=9, draft_model_path=str(small)).draft_model.loaded.spec.num_blocks == 9


def test_padded_steps(path, prompt):
    runner = load(path, draft_model_path=str(path), cuda_graphs="pad")
    outputs, statistics = drafted(runner, [prompt, prompt[7:], prompt[:11]])
    assert outputs[0] == EXPECTED
    assert statistics.accepted_tokens == statistics.draft_tokens > 0


# ---- sleep and updates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "order", [[ALL_TAGS], [WEIGHTS, KV_CACHE], [KV_CACHE, WEIGHTS]], ids=["all", "weights first", "cache first"]
)
def test_both_sleep_and_wake(path, small, prompt, level, order):
    runner = load(path, draft_model_path=str(small), kv_cache_memory=KV_BYTES)
    fall_asleep(runner, level)
    assert asleep(runner) == asleep(runner.draft_model.loaded) == ALL_TAGS
    for tags in order:
        with pytest.raises(InvariantError, match="sleep"):
            drafted(runner, [prompt])
        runner.wake(tags)
    (output,), statistics = drafted(runner, [prompt])
    assert output == EXPECTED
    assert statistics.draft_tokens > 0


def test_a_worker_may_begin_asleep(path, small, prompt):
    runner = load(path, draft_model_path=str(small), asleep=tuple(ALL_TAGS))
    assert asleep(runner) == asleep(runner.draft_model.loaded) == ALL_TAGS
    runner.wake(ALL_TAGS)
    assert drafted(runner, [prompt])[0] == [EXPECTED]


@pytest.mark.parametrize("missing", ["path", "small"])
def test_one_that_cannot_wake_leaves_both_asleep(path, small, prompt, missing, tmp_path):
    runner = load(path, draft_model_path=str(small), asleep=tuple(ALL_TAGS))
    gone = {"path": path, "small": small}[missing]
    gone.rename(tmp_path / "elsewhere")
    runner.wake(KV_CACHE)
    with pytest.raises(ModelError, match="no model at"):
        runner.wake(WEIGHTS)
    for loaded in (runner, runner.draft_model.loaded):
        assert asleep(loaded) == WEIGHTS
    assert all(loaded.weights.are_discarded for loaded in runner.loaded)
    (tmp_path / "elsewhere").rename(gone)
    runner.wake(WEIGHTS)
    assert drafted(runner, [prompt])[0] == [EXPECTED]


def test_the_progress_is_of_both(path, small):
    seen = []
    config = WorkerConfig(str(path), device="cpu", kv_cache_memory=KV_BYTES, draft_model_path=str(small))
    runner = TorchModelRunner.load(config, lambda done, total: seen.append((done, total)))
    total = sum(loaded.spec.stored_bytes for loaded in runner.loaded)
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen) and {each[1] for each in seen} == {total}


def test_new_weights_are_the_models_alone(path, small, prompt, tiny_llama, tmp_path):
    other = tiny_llama.write(tmp_path / "other", "plain", seed=1)
    runner = load(path, draft_model_path=str(path))
    drafting = runner.draft_model.loaded.model
    runner.update_weights(str(other))
    assert runner.draft_model.loaded.model is drafting
    (output,), statistics = drafted(runner, [prompt])
    assert [output] == generate(load(other), [prompt], 48)[0]
    assert statistics.accepted_tokens < statistics.draft_tokens


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(path, tiny_llama, tmp_path):
    other = tiny_llama.write(tmp_path / "other", "plain", vocab_size=201)
    with pytest.raises(ModelError, match=r"other cannot draft for .*plain: it has 201 tokens, not 200$"):
        load(path, draft_model_path=str(other))


@pytest.mark.parametrize("memory", [{}, {"kv_blocks": 2}], ids=["much", "little"])
def test_a_shorter_context_is_refused(path, tiny_llama, tmp_path, memory):
    """With little memory as well, which holds no longer a context than the draft model's."""
    short = tiny_llama.write(tmp_path / "short", "plain", max_position_embeddings=64)
    with pytest.raises(ModelError, match=r"short, the draft model, has .* 64 tokens, .* 256: set max_model_len"):
        load(path, draft_model_path=str(short), **memory)
    assert load(path, draft_model_path=str(short), max_model_len=64).info.max_model_len == 64


def test_other_kinds_are_refused(path, tmp_path, tiny_smolvlm):
    others = {
        "a model with states": tiny_decoders.write(tmp_path / "states", "lfm2"),
        "an embedding model": tiny_embedder.write(tmp_path / "embedder"),
        "a model with images": tiny_smolvlm.write(tmp_path / "images", "split"),
    }
    for kind, other in others.items():
        for pair in ((path, other), (other, path)):
            with pytest.raises(ModelError, match=f"is {kind}, which draft_model"):
                load(pair[0], draft_model_path=str(pair[1]))


def test_a_draft_is_that_of_the_next_tokens(path, prompt):
    """Of a sequence whose last token only is not computed."""
    runner = load(path, draft_model_path=str(path))
    info = runner.info
    scheduler = Scheduler(Limits(info.vocab_size, 256, 8, info.block_size), drafter=runner)
    scheduler.add(Sequence(0, 0, list(prompt), len(prompt), GREEDY, frozenset()))
    output = scheduler.schedule()
    scheduler.update(output, runner.execute(output))
    output = scheduler.schedule()
    assert list(output.scheduled[0].draft) == EXPECTED[1 : 1 + len(output.scheduled[0].draft)]
