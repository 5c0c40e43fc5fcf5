"""The scheduler: refusals, failures, aborts, the prefix cache, and preemption."""

from __future__ import annotations

import pytest
from helpers.toy_driver import answer, finish, make, params, run_all, run_step, sequence_of, shape

from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.messages import RequestFailed
from trioengine.core.types import FinishReason
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.worker.scheduling.sequence import SequenceStatus

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
    failed = sequence_of(1, [1] * 20)
    scheduler.add(failed)
    scheduler.add(sequence_of(2, [2] * 5))
    ends = {row.request: row for row in run_all(scheduler, runner)}
    assert ends[1] == RequestFailed(1, 1, "sampling_failed", "failed on request")
    assert failed.token_ids == [1] * 20
    assert ends[2].finish_reason is FinishReason.LENGTH
    assert scheduler.blocks.full.num_cached == 2
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
    assert scheduler.blocks.full.num_held == 0


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
    sequences = {1: sequence_of(1, [1]), 2: sequence_of(2, [1])}
    scheduler.add(sequences[1])
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(InvariantError, match="sampled"):
        scheduler.update(output, [sequences[request].row(5) for request in requests])


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
    first, second = sequence_of(1, [5] * 13), sequence_of(2, [5] * 13)
    for sequence in (first, second):
        scheduler.add(sequence)
    run_all(scheduler, runner)
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 0]
    assert first.token_ids == second.token_ids


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_the_latest_is_preempted_and_recomputed() -> None:
    scheduler, runner = make(kv_blocks_total=6)
    sequences = [sequence_of(request, [request] * 8, params(12)) for request in (1, 2)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [row.request for row in run_all(scheduler, runner)] == [1, 2]
    assert scheduler.statistics(0).num_preemptions == 1
    for sequence in sequences:
        assert sequence.token_ids[8:] == answer([sequence.request] * 8, sequence.params, 64)


def test_a_preempted_sequence_is_the_first_of_the_waiting() -> None:
    scheduler, runner = make(kv_blocks_total=6)
    for request in (1, 2, 3):
        scheduler.add(sequence_of(request, [request] * 8, params(12)))
    while not scheduler.statistics(0).num_preemptions:
        run_step(scheduler, runner)
    assert [sequence.request for sequence in scheduler._waiting] == [2, 3]
    assert scheduler._waiting[0].status is SequenceStatus.PREEMPTED
    assert scheduler._waiting[0].num_cached_tokens == 0
    assert [row.request for row in run_all(scheduler, runner)] == [1, 2, 3]


def test_the_oldest_always_makes_progress() -> None:
    scheduler, runner = make(kv_blocks_total=4, max_model_len=16)
    for request in range(1, 5):
        scheduler.add(sequence_of(request, [request] * 3, params(13)))
    oldest = scheduler._sequences[1]
    for length in range(4, 16):
        run_step(scheduler, runner)
        assert oldest.num_tokens == length
    assert [row.request for row in run_all(scheduler, runner)] == [1, 2, 3, 4]


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
