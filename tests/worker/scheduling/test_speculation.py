"""Speculation: the same answers as without, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.toy_driver import answer, make, params, run_all, run_step, sequence_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine import Grammar
from trioengine.core.errors import InvariantError
from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sampled, SchedulerOutput
from trioengine.worker.scheduling.speculation import (
    FIRST_DRAFT,
    LONGEST_PAUSE,
    Pace,
    shared,
    verified,
)
from trioengine.worker.scheduling.step_plan import MAX_DRAFTED_STEP

PROMPT = [1, 2, 3]


def speculative(**changes: int) -> tuple[Scheduler, ToyRunner]:
    """With a drafter that is right more often than not."""
    limits = make(**changes)[0].limits
    runner = ToyRunner(limits)
    return Scheduler(limits, drafter=runner), runner


# ---- lengths -------------------------------------------------------------------------------------------------------


def test_a_draft_is_never_longer_than_asked() -> None:
    pace = Pace()
    for most in range(1, 15):
        assert pace.length(most) == min(most, FIRST_DRAFT)


def test_drafts_grow_while_they_are_kept_and_shrink_to_their_part() -> None:
    pace, lengths = Pace(), []
    for kept in (4, 8, 15, 15, 3, 3, 6):
        lengths.append(pace.length(15))
        pace.learn(lengths[-1], kept)
    assert lengths == [4, 8, 15, 15, 15, 3, 6]


def test_drafts_of_which_nothing_is_kept_become_rare() -> None:
    pace, steps = Pace(), []
    for step in range(1000):
        if length := pace.length(15):
            steps.append(step)
            pace.learn(length, 0)
    assert steps[:6] == [0, 1, 3, 6, 11, 20]
    assert len(steps) < 1000 // LONGEST_PAUSE + 10


def test_a_kept_draft_ends_the_pauses() -> None:
    pace = Pace()
    for _ in range(3):
        pace.learn(4, 0)
    while not pace.length(15):
        pass
    pace.learn(1, 1)
    assert pace.length(15) == 2
    pace.learn(2, 0)
    pace.learn(1, 0)
    assert [pace.length(15) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "room", "shares"),
    [
        ([], 5, []),
        ([4, 4], 8, [4, 4]),
        ([8, 1, 3], 9, [5, 1, 3]),
        ([4, 4, 4], 2, [1, 1, 0]),
        ([2, 0, 2], 3, [2, 0, 1]),
        ([3], 0, [0]),
        ([3], -1, [0]),
    ],
)
def test_the_room_is_shared(wanted: list[int], room: int, shares: list[int]) -> None:
    assert shared(wanted, room) == shares


# ---- results -------------------------------------------------------------------------------------------------------


def rows_of(*ids: int) -> list[TokensRow | RequestFailed]:
    return [TokensRow(1, 1, token_ids([each]), ({each: -0.5},)) for each in ids]


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [((1, 2, 3), (1, 2, 3)), ((1, 2, 2), (1, 2, 2)), ((1, 3, 3), (1, 3)), ((4, 2, 3), (4,))],
)
def test_rows_are_joined_up_to_a_difference(sampled: tuple[int, ...], kept: tuple[int, ...]) -> None:
    row = verified((1, 2), rows_of(*sampled))
    assert isinstance(row, TokensRow)
    assert (tuple(row.token_ids), row.logprobs) == (kept, tuple({each: -0.5} for each in kept))


def test_a_failure_behind_a_draft_is_left_to_the_next_step() -> None:
    failure = RequestFailed(1, 1, "sampling_failed", "not finite")
    row = verified((1, 2), [*rows_of(1), failure, *rows_of(3)])
    assert isinstance(row, TokensRow) and row.token_ids.tolist() == [1]
    assert verified((1,), [failure, *rows_of(2)]) is failure


def test_a_runner_that_keeps_another_token_is_refused() -> None:
    scheduler, runner = speculative(block_size=16)
    scheduler.add(sequence_of(1, PROMPT, params(20, num_speculative_tokens=4)))
    run_step(scheduler, runner)
    output = scheduler.schedule()
    assert output is not None and output.scheduled[0].draft
    (row,) = runner.execute(output)
    assert isinstance(row, TokensRow)
    row.token_ids = token_ids([*(each ^ 1 for each in output.scheduled[0].draft), 5])
    with pytest.raises(InvariantError, match="were drafted"):
        scheduler.update(output, [row])


# ---- answers -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=6),
    options=st.lists(
        st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 40),
                "min_tokens": st.integers(0, 1),
                "ignore_eos": st.booleans(),
                "logprobs": st.sampled_from([None, 0, 2]),
                "stop_token_ids": st.sampled_from([(), tuple(b" e")]),
                "num_speculative_tokens": st.integers(0, 15),
            }
        ),
        min_size=6,
        max_size=6,
    ),
    block_size=st.integers(1, 8),
    spare_blocks=st.integers(0, 12),
    chunk=st.integers(1, 12),
)
def test_answers_are_those_without_drafts(
    prompts: list[list[int]], options: list[dict[str, Any]], block_size: int, spare_blocks: int, chunk: int
) -> None:
    """In small caches, with preemptions, prefix hits, and cuts by the end of the answer or of the context."""
    most = 40
    scheduler, runner = speculative(
        max_model_len=most,
        kv_blocks_total=-(-most // block_size) + spare_blocks,
        block_size=block_size,
        max_num_batched_tokens=16,
        chunked_prefill_size=chunk,
    )
    sequences = [
        sequence_of(number, prompt, params(**each))
        for number, (prompt, each) in enumerate(zip(prompts, options, strict=False))
    ]
    rows: dict[int, list[int]] = {each.request: [] for each in sequences}
    logprobs: dict[int, list[object]] = {each.request: [] for each in sequences}
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        for row in run_step(scheduler, runner):
            assert isinstance(row, TokensRow)
            rows[row.request] += row.token_ids
            logprobs[row.request] += row.logprobs or ()
    for sequence in sequences:
        expected = answer(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params, most)
        assert rows[sequence.request] == sequence.output == expected
        has_logprobs = sequence.params.logprobs is not None
        assert len(logprobs[sequence.request]) == (len(expected) if has_logprobs else 0)
    assert scheduler.blocks.full.num_held == 0
    statistics = scheduler.statistics(0)
    assert 0 <= statistics.accepted_tokens <= statistics.draft_tokens
    assert statistics.generation_tokens == sum(map(len, rows.values()))


def test_there_are_fewer_steps_and_the_counts_show_why() -> None:
    num_steps = []
    for drafted in (0, 8):
        scheduler, runner = speculative(block_size=16)
        scheduler.add(sequence_of(1, PROMPT, params(40, num_speculative_tokens=drafted)))
        run_all(scheduler, runner)
        statistics = scheduler.statistics(0)
        num_steps.append(statistics.num_steps)
        assert statistics.generation_tokens == 40
        assert statistics.accepted_tokens == 40 - statistics.num_steps
        assert statistics.num_tokens == len(PROMPT) + statistics.num_steps - 1 + statistics.draft_tokens
    assert num_steps[0] == 40 and num_steps[1] < 30


def test_a_step_has_few_drafts_and_prompts_come_first() -> None:
    scheduler, runner = speculative(block_size=16, max_num_seqs=24, max_num_batched_tokens=40, kv_blocks_total=200)
    for number in range(12):
        scheduler.add(sequence_of(number, [number, 5], params(30, num_speculative_tokens=15)))
    run_step(scheduler, runner)
    output = scheduler.schedule()
    assert output is not None
    assert sum(entry.num_new_tokens for entry in output.scheduled) == MAX_DRAFTED_STEP
    scheduler.update(output, runner.execute(output))
    scheduler.add(sequence_of(99, [7] * 40, params(3)))
    output = scheduler.schedule()
    assert output is not None
    assert not any(entry.draft for entry in output.scheduled)
    assert sum(entry.num_new_tokens for entry in output.scheduled) == 40


def test_a_draft_takes_no_block() -> None:
    scheduler, runner = speculative(block_size=4)
    sequence = sequence_of(1, PROMPT, params(30, num_speculative_tokens=15))
    scheduler.add(sequence)
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        assert len(sequence.block_table) == -(-sequence.num_tokens // 4)
        scheduler.update(output, runner.execute(output))


def test_an_answer_ends_in_the_middle_of_a_draft() -> None:
    """By a stop token: the tokens behind it are neither sent nor counted."""
    whole = answer(PROMPT, params(30), 64)
    for stop in sorted(set(whole[:12])):
        sampling = params(30, num_speculative_tokens=15, stop_token_ids=(stop,))
        scheduler, runner = speculative(block_size=32)
        sequence = sequence_of(1, PROMPT, sampling)
        scheduler.add(sequence)
        (end,) = run_all(scheduler, runner)
        assert isinstance(end, TokensRow) and end.finish_reason is FinishReason.STOP
        assert sequence.output == whole[: whole.index(stop) + 1]
        assert scheduler.statistics(0).generation_tokens == len(sequence.output)


def test_blocks_of_kept_drafts_are_found_again() -> None:
    """And no block with a token that was not kept."""
    scheduler, runner = speculative(block_size=4)
    first = sequence_of(1, PROMPT, params(30, num_speculative_tokens=15))
    scheduler.add(first)
    run_all(scheduler, runner)
    second = sequence_of(2, [*PROMPT, *first.output, 9], params(4))
    scheduler.add(second)
    run_all(scheduler, runner)  # the runner checks the values that it begins with
    assert second.num_cached_tokens == len(PROMPT) + len(first.output) - 1


class Counting:
    """A runner whose next token is the last one plus 1."""

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        return [
            verified(entry.draft, [each.row(each.token_ids[-1] + 1) for each in entry.sampled_behind])
            for entry in output.scheduled
            if entry.samples
        ]


def test_a_repeated_text_is_drafted_from_the_prompt() -> None:
    """With drafts of 4, 8 and 7 tokens, all of them kept."""
    scheduler = Scheduler(Limits(vocab_size=100, max_model_len=100, kv_blocks_total=4, block_size=32))
    sequence = sequence_of(1, [*range(1, 40), 1, 2, 3], params(24, num_speculative_tokens=15))
    scheduler.add(sequence)
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, Counting().execute(output))
    assert sequence.output == list(range(4, 28))
    statistics = scheduler.statistics(0)
    assert (statistics.num_steps, statistics.draft_tokens, statistics.accepted_tokens) == (5, 19, 19)


def test_a_grammar_forces_tokens_instead() -> None:
    scheduler = Scheduler(Limits(VOCAB_SIZE, 64, 16, 4))
    grammars = (None, Grammar.regex("a*"))
    sequences = [
        sequence_of(number, PROMPT, params(5, num_speculative_tokens=4, grammar=grammar))
        for number, grammar in enumerate(grammars)
    ]
    for sequence in (*sequences, sequence_of(9, PROMPT, params(5))):
        scheduler.add(sequence)
    assert [each.pace is not None for each in sequences] == [True, False]
