"""The scheduler: order, limits, chunked prefill, preemption, refusals, and every way to finish."""

from __future__ import annotations

import pytest
from toy_driver import answer, next_token, run_all, run_step, sequence_of

from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.messages import FinishReason
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.toy_model import IM_END as EOS
from trioengine.testing.toy_model import VOCAB_SIZE, ToyRunner
from trioengine.worker.scheduling.limits import Limits
from trioengine.worker.scheduling.output import SampledToken
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import SequenceStatus


def make(**changes: int) -> tuple[Scheduler, ToyRunner]:
    values = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 64,
        "kv_blocks_total": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    limits = Limits(**(values | changes))
    return Scheduler(limits), ToyRunner(limits.block_size)


def params(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, **({"ignore_eos": True} | changes))  # type: ignore[arg-type]


def shape(scheduler: Scheduler, runner: ToyRunner) -> list[tuple[int, int]]:
    """(request, tokens) of the next step, which is run."""
    output = scheduler.schedule()
    assert output is not None
    shape = [(entry.sequence.request, entry.num_new_tokens) for entry in output.scheduled]
    scheduler.update(output, runner.execute(output))
    scheduler.check_integrity()
    return shape


# ---- what a step computes -------------------------------------------------------------------------------------------


def test_nothing_to_do_is_none() -> None:
    scheduler, _ = make()
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler, runner = make()
    scheduler.add(sequence_of(1, list(range(35)), params(2)))
    assert [shape(scheduler, runner) for _ in range(4)] == [[(1, 16)], [(1, 16)], [(1, 3)], [(1, 1)]]
    assert not scheduler.has_work


def test_decodes_come_before_chunks_and_chunks_before_the_waiting() -> None:
    scheduler, runner = make()
    scheduler.add(sequence_of(1, [1] * 30, params(9)))
    scheduler.add(sequence_of(2, [2] * 3, params(9)))
    scheduler.add(sequence_of(3, [3] * 20, params(9)))
    assert shape(scheduler, runner) == [(1, 16)]
    assert shape(scheduler, runner) == [(1, 14), (2, 2)]
    assert shape(scheduler, runner) == [(1, 1), (2, 1), (3, 14)]
    scheduler.add(sequence_of(4, [4] * 2, params(9)))
    assert shape(scheduler, runner) == [(1, 1), (2, 1), (3, 6), (4, 2)]


def test_decodes_are_left_out_of_some_steps_while_prompts_fill_them() -> None:
    """Of 16 tokens in chunks of 4: three chunks alone, then one with the decodes."""
    scheduler, runner = make(chunked_prefill_size=4)
    scheduler.add(sequence_of(1, [1] * 3, params(9)))
    assert shape(scheduler, runner) == [(1, 3)]
    scheduler.add(sequence_of(2, [2] * 5, params(9)))
    scheduler.add(sequence_of(3, [3] * 16, params(9)))
    assert [shape(scheduler, runner) for _ in range(3)] == [[(2, 4)], [(2, 1), (3, 3)], [(3, 4)]]
    assert shape(scheduler, runner) == [(1, 1), (2, 1), (3, 4)]
    assert shape(scheduler, runner) == [(3, 4)]
    assert shape(scheduler, runner) == [(1, 1), (2, 1), (3, 1)]


def test_decodes_are_not_left_out_for_prompts_that_do_not_fill_a_step() -> None:
    scheduler, runner = make(chunked_prefill_size=4)
    scheduler.add(sequence_of(1, [1] * 3, params(9)))
    assert shape(scheduler, runner) == [(1, 3)]
    scheduler.add(sequence_of(2, [2] * 3, params(9)))
    assert shape(scheduler, runner) == [(1, 1), (2, 3)]


@pytest.mark.parametrize("limits", [{"kv_blocks_total": 12}, {"max_num_seqs": 2}], ids=["blocks", "sequences"])
def test_decodes_are_not_left_out_for_prompts_that_cannot_run(limits: dict[str, int]) -> None:
    """What is left of the running one does not fill the step, and there is no place for the next one."""
    scheduler, runner = make(chunked_prefill_size=4, **limits)
    scheduler.add(sequence_of(1, [1] * 3, params(9)))
    assert shape(scheduler, runner) == [(1, 3)]
    scheduler.add(sequence_of(2, [2] * 6, params(9)))
    scheduler.add(sequence_of(3, [3] * 36, params(9)))
    assert shape(scheduler, runner) == [(2, 4)]
    assert shape(scheduler, runner) == [(1, 1), (2, 2)]


def test_decodes_are_not_left_out_for_prompts_that_are_in_the_cache() -> None:
    scheduler, runner = make(chunked_prefill_size=4)
    scheduler.add(sequence_of(1, [5] * 20, params(1)))
    run_all(scheduler, runner)
    scheduler.add(sequence_of(2, [1] * 3, params(9)))
    assert shape(scheduler, runner) == [(2, 3)]
    scheduler.add(sequence_of(3, [5] * 20, params(9)))
    assert shape(scheduler, runner) == [(2, 1), (3, 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler, runner = make(max_num_seqs=2)
    for request in (1, 2, 3):
        scheduler.add(sequence_of(request, [request], params(request)))
    assert shape(scheduler, runner) == [(1, 1), (2, 1)]
    assert scheduler.statistics(0).num_waiting == 1
    assert shape(scheduler, runner) == [(2, 1), (3, 1)]


def test_decodes_beyond_the_token_budget_wait_a_step() -> None:
    scheduler, runner = make(max_num_batched_tokens=2)
    for request in (1, 2, 3):
        scheduler.add(sequence_of(request, [request], params(2)))
    assert [row.sequence.request for row in run_all(scheduler, runner)] == [1, 2, 3]


# ---- finishing ------------------------------------------------------------------------------------------------------


def finish(prompt: list[int], sampling: SamplingParams, **limits: int) -> tuple[FinishReason | None, list[int]]:
    scheduler, runner = make(**limits)
    sequence = sequence_of(1, prompt, sampling)
    scheduler.add(sequence)
    (end,) = run_all(scheduler, runner)
    assert sequence.status is SequenceStatus.FINISHED
    assert scheduler.blocks.num_held == 0
    assert sequence.token_ids[len(prompt) :] == answer(prompt, sampling, scheduler.limits.max_sequence_len)
    return end.finish_reason, sequence.token_ids[len(prompt) :]


def prompt_before_eos(num_tokens: int) -> list[int]:
    """A prompt whose answer has its first end token as token number `num_tokens`."""
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            tokens = answer([first, second], SamplingParams(max_tokens=num_tokens + 1, seed=1), 64)
            if len(tokens) == num_tokens and tokens[-1] == EOS:
                return [first, second]
    raise AssertionError("no such prompt")


def test_the_end_token_stops() -> None:
    reason, tokens = finish(prompt_before_eos(3), params(9, ignore_eos=False))
    assert (reason, len(tokens), tokens[-1]) == (FinishReason.STOP, 3, EOS)


def test_the_end_token_is_ignored_when_asked() -> None:
    reason, tokens = finish(prompt_before_eos(3), params(9))
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 9)


def test_the_end_token_before_min_tokens_does_not_stop() -> None:
    reason, tokens = finish(prompt_before_eos(3), params(5, ignore_eos=False, min_tokens=4))
    assert tokens[2] == EOS
    assert len(tokens) > 3
    assert finish(prompt_before_eos(3), params(5, ignore_eos=False, min_tokens=3)) == (FinishReason.STOP, tokens[:3])
    assert reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_the_end_token_as_the_last_one_allowed_is_a_stop() -> None:
    reason, _ = finish(prompt_before_eos(3), params(3, ignore_eos=False))
    assert reason is FinishReason.STOP


def test_stop_token_ids_stop_even_when_the_end_token_is_ignored() -> None:
    second = next_token([1, 2, next_token([1, 2])])
    reason, tokens = finish([1, 2], params(30, stop_token_ids=(second,)))
    assert reason is FinishReason.STOP
    assert tokens[-1] == second
    assert len(tokens) <= 2


def test_max_model_len_is_a_length() -> None:
    reason, tokens = finish([1, 2, 3], params(100), max_model_len=10)
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 7)


def test_the_kv_cache_bounds_the_length() -> None:
    reason, tokens = finish([1, 2, 3], params(100), kv_blocks_total=2)
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 5)


# ---- refusals, failures, aborts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([1] * 64, "context_length_exceeded"),
        ([1, VOCAB_SIZE], "invalid_value"),
        ([-1, 1], "invalid_value"),
    ],
)
def test_what_cannot_run_is_refused_and_changes_nothing(prompt: list[int], code: str) -> None:
    scheduler, _ = make()
    with pytest.raises(RequestRejected) as caught:
        scheduler.add(sequence_of(1, prompt))
    assert caught.value.code == code
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_a_prompt_that_leaves_one_token_is_accepted() -> None:
    reason, tokens = finish([1] * 63, params(5))
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 1)


def test_a_failed_sequence_fails_alone_and_its_blocks_are_not_cached() -> None:
    scheduler, runner = make()
    runner.fail_requests = {1}
    scheduler.add(sequence_of(1, [1] * 20))
    scheduler.add(sequence_of(2, [2] * 5))
    ends = {row.sequence.request: row for row in run_all(scheduler, runner)}
    assert ends[1].finish_reason is FinishReason.ERROR
    assert ends[1].sequence.token_ids == [1] * 20
    assert ends[2].finish_reason is FinishReason.LENGTH
    assert scheduler.blocks.num_cached == 2
    scheduler.add(sequence_of(3, [1] * 20))
    run_all(scheduler, runner)
    assert scheduler.statistics(0).prefix_cache_hits == 0


def test_abort_in_every_state() -> None:
    scheduler, runner = make(max_num_seqs=2)
    for request in (1, 2, 3):
        scheduler.add(sequence_of(request, [request] * 20))
    run_step(scheduler, runner)
    for request in (3, 2, 1):  # waiting, in the middle of its prefill, running
        aborted = scheduler.abort(request)
        assert aborted is not None
        assert aborted.status is SequenceStatus.FINISHED
        scheduler.check_integrity()
        assert scheduler.abort(request) is None
    assert not scheduler.has_work
    assert scheduler.blocks.num_held == 0


def test_misuse_is_noticed() -> None:
    scheduler, runner = make()
    sequence = sequence_of(1, [1])
    scheduler.add(sequence)
    with pytest.raises(InvariantError, match="twice"):
        scheduler.add(sequence)
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(InvariantError, match="running step"):
        scheduler.abort(1)
    with pytest.raises(InvariantError, match="has not been updated"):
        scheduler.schedule()
    sampled = runner.execute(output)
    scheduler.update(output, sampled)
    with pytest.raises(InvariantError, match="not the step"):
        scheduler.update(output, sampled)


@pytest.mark.parametrize("requests", [[], [2], [1, 1]])
def test_a_runner_that_answers_something_else_is_noticed(requests: list[int]) -> None:
    scheduler, _ = make()
    scheduler.add(sequence_of(1, [1]))
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(InvariantError, match="sampled"):
        scheduler.update(output, [SampledToken(request, 5) for request in requests])


def test_limits_that_allow_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_blocks_total"):
        make(kv_blocks_total=0)
    with pytest.raises(ValueError, match="max_model_len"):
        make(max_model_len=1)


def test_integrity_notices_lost_and_mixed_up_sequences() -> None:
    scheduler, runner = make(max_num_seqs=1)
    for request in (1, 2):
        scheduler.add(sequence_of(request, [request]))
    run_step(scheduler, runner)
    running, waiting = scheduler._running[0], scheduler._waiting[0]
    for sequence, wrong in ((running, SequenceStatus.WAITING), (waiting, SequenceStatus.RUNNING)):
        right, sequence.status = sequence.status, wrong
        with pytest.raises(InvariantError):
            scheduler.check_integrity()
        sequence.status = right
    scheduler._waiting.clear()
    with pytest.raises(InvariantError, match="known"):
        scheduler.check_integrity()


# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_the_next_turn_finds_the_turn_before() -> None:
    scheduler, runner = make()
    first = sequence_of(1, list(range(10)), params(6))
    scheduler.add(first)
    run_all(scheduler, runner)
    assert first.num_cached_tokens == 0
    second = sequence_of(2, [*first.token_ids, 7, 7], params(6))
    scheduler.add(second)
    assert shape(scheduler, runner) == [(2, 18 - 12)]
    assert second.num_cached_tokens == 12  # the 15 computed ones: three full blocks
    run_all(scheduler, runner)
    assert second.token_ids[18:] == answer(second.token_ids[:18], second.params, 64)
    statistics = scheduler.statistics(0)
    assert (statistics.prefix_cache_queries, statistics.prefix_cache_hits) == (28, 12)


def test_sequences_admitted_together_do_not_share_what_is_not_computed() -> None:
    scheduler, runner = make(max_num_batched_tokens=64)
    for request in (1, 2):
        scheduler.add(sequence_of(request, [5] * 13))
    ends = run_all(scheduler, runner)
    assert [row.sequence.num_cached_tokens for row in ends] == [0, 0]
    assert ends[0].sequence.token_ids == ends[1].sequence.token_ids


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_the_latest_is_preempted_and_recomputed() -> None:
    scheduler, runner = make(kv_blocks_total=6)
    for request in (1, 2):
        scheduler.add(sequence_of(request, [request] * 8, params(12)))
    ends = run_all(scheduler, runner)
    assert [row.sequence.request for row in ends] == [1, 2]
    assert scheduler.statistics(0).num_preemptions == 1
    for row in ends:
        assert row.sequence.token_ids[8:] == answer([row.sequence.request] * 8, row.sequence.params, 64)


def test_a_preempted_sequence_is_the_first_of_the_waiting() -> None:
    scheduler, runner = make(kv_blocks_total=6)
    for request in (1, 2, 3):
        scheduler.add(sequence_of(request, [request] * 8, params(12)))
    while not scheduler.statistics(0).num_preemptions:
        run_step(scheduler, runner)
    assert [sequence.request for sequence in scheduler._waiting] == [2, 3]
    assert scheduler._waiting[0].status is SequenceStatus.PREEMPTED
    assert scheduler._waiting[0].num_cached_tokens == 0
    assert [row.sequence.request for row in run_all(scheduler, runner)] == [1, 2, 3]


def test_the_oldest_always_makes_progress() -> None:
    scheduler, runner = make(kv_blocks_total=4, max_model_len=16)
    for request in range(1, 5):
        scheduler.add(sequence_of(request, [request] * 3, params(13)))
    oldest = scheduler._sequences[1]
    for length in range(4, 16):
        run_step(scheduler, runner)
        assert oldest.num_tokens == length
    assert [row.sequence.request for row in run_all(scheduler, runner)] == [1, 2, 3, 4]


def test_a_sequence_that_needs_every_block_runs() -> None:
    reason, tokens = finish([1] * 15, params(5), kv_blocks_total=4)
    assert (reason, len(tokens)) == (FinishReason.LENGTH, 1)


def test_a_block_is_kept_back_for_each_that_runs() -> None:
    scheduler, runner = make(kv_blocks_total=4)
    scheduler.add(sequence_of(1, [1] * 8, params(5)))
    scheduler.add(sequence_of(2, [2] * 8, params(5)))
    assert shape(scheduler, runner) == [(1, 8)]
    run_all(scheduler, runner)
    assert scheduler.statistics(0).num_preemptions == 0
