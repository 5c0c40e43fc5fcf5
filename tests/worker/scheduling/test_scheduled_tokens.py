"""What a step computes: decodes, chunks of prompts, and the limits of both."""

from __future__ import annotations

import pytest
from helpers.toy_driver import make, params, run_all, sequence_of, shape

from trioengine.worker.scheduling.scheduler import MAX_SKIPS


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


def test_decodes_are_left_out_of_no_more_than_three_steps_in_a_row() -> None:
    scheduler, runner = make(chunked_prefill_size=1)
    scheduler.add(sequence_of(1, [1], params(9)))
    assert shape(scheduler, runner) == [(1, 1)]
    scheduler.add(sequence_of(2, [2] * 9, params(1)))
    chunks = [[(2, 1)]] * MAX_SKIPS
    assert [shape(scheduler, runner) for _ in range(8)] == [*chunks, [(1, 1), (2, 1)], *chunks, [(1, 1), (2, 1)]]


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
    assert [row.request for row in run_all(scheduler, runner)] == [1, 2, 3]
