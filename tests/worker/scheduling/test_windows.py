"""Blocks of windows: who holds them, when they are given back, and prefixes that end where they are there."""

import pytest
from helpers.toy_driver import answer, make, params, run_all, run_step, sequence_of

from trioengine.worker.scheduling.sequence import MAX_FORCED, Limits, SequenceStatus, Windows

WINDOW = 9
LEAST = 12  # blocks of 4 tokens: of a window, a step of 16 tokens, forced tokens, and two that are seen in part
LONG = [n * 7 % 200 for n in range(90)]


def windowed(num_blocks=LEAST, **changes):
    return make(**({"windows": Windows(WINDOW, num_blocks), "max_model_len": 200} | changes))


def run(scheduler, runner, request, prompt, max_tokens=4, **others):
    """A request alone: its answer, how many tokens were found, and the most blocks of windows that were held."""
    sequence = sequence_of(request, prompt, params(max_tokens, **others))
    scheduler.add(sequence)
    most = 0
    while sequence.status is not SequenceStatus.FINISHED:
        run_step(scheduler, runner)
        most = max(most, scheduler.blocks.windowed.num_held)
    output = sequence.token_ids[len(prompt) :]
    assert output == answer(prompt, params(max_tokens, **others), scheduler.limits.max_sequence_len)
    return output, sequence.num_cached_tokens, most


def counts(scheduler):
    blocks = scheduler.blocks.windowed
    return blocks.num_free, blocks.num_cached, blocks.num_held


def test_a_long_sequence_holds_the_blocks_of_its_window_only():
    scheduler, runner = windowed()
    _, _, most = run(scheduler, runner, 1, LONG, max_tokens=60)
    assert most <= 7  # 16 new tokens, and 8 before them, which begin in the middle of a block
    assert scheduler.blocks.full.num_cached == 149 // 4
    assert counts(scheduler)[2] == 0


def test_a_decoding_sequence_holds_no_more_than_its_window():
    scheduler, runner = windowed()
    sequence = sequence_of(1, LONG, params(40))
    scheduler.add(sequence)
    while len(sequence.token_ids) < 120:
        run_step(scheduler, runner)
    assert len(sequence.window_table) <= 4
    assert sequence.num_behind == (sequence.num_computed_tokens + 1 - WINDOW) // 4
    run_all(scheduler, runner)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 16, 64, 500])
def test_every_size_of_a_window(size):
    most = 2 + -(-(size + 16 + MAX_FORCED) // 4)
    scheduler, runner = windowed(windows=Windows(size, most))
    for request, length in enumerate((1, 3, 4, 5, 50, 90)):
        run(scheduler, runner, request, LONG[:length], max_tokens=20)


def test_the_next_turn_finds_all_of_the_last():
    scheduler, runner = windowed()
    tokens = list(LONG)
    for turn in range(5):
        output, found, _ = run(scheduler, runner, turn, tokens)
        assert found == (0 if turn == 0 else (len(tokens) - 3) // 4 * 4)
        tokens += [*output, turn, 9]


def test_idle_sessions_keep_their_windows():
    """Long prompts of others stream through the blocks of windows, and evict those behind their own windows first."""
    scheduler, runner = windowed(num_blocks=LEAST + 5 * 4, kv_blocks_total=400)
    histories = [[n, *LONG[: 60 + n]] for n in range(5)]
    for turn in range(3):
        for n, history in enumerate(histories):
            output, found, _ = run(scheduler, runner, 10 * turn + n, history)
            assert found == (0 if turn == 0 else (len(history) - 4) // 4 * 4)
            history += [*output, turn, n, 7]
        run(scheduler, runner, 10 * turn + 9, [100 + turn, *LONG])


def test_a_prefix_that_is_computed_again_is_not_evicted_early():
    """Its blocks replace those with the same content that no sequence holds."""
    scheduler, runner = windowed(num_blocks=LEAST, kv_blocks_total=60)
    run(scheduler, runner, 1, LONG)
    run(scheduler, runner, 2, [1] * 60)
    assert run(scheduler, runner, 3, LONG)[1] < 40  # the others are computed again
    assert scheduler.blocks.full.num_cached == 93 // 4 + 63 // 4
    run(scheduler, runner, 4, [2] * 100)  # evicts blocks of the second one
    assert scheduler.blocks.full.find(scheduler.blocks._digest(sequence_of(5, [1] * 60), 15)) is None
    found = [scheduler.blocks.full.find(scheduler.blocks._digest(sequence_of(6, LONG), n)) for n in range(1, 23)]
    assert None not in found


def test_prefixes_that_part_within_a_block_are_copied_in_both():
    scheduler, runner = windowed(num_blocks=40)
    run(scheduler, runner, 1, [*LONG[:30], 1, 2, 3, 4])
    assert run(scheduler, runner, 2, [*LONG[:30], 5, 6, 7, 8])[1] == 30


def test_a_prefix_ends_where_the_blocks_that_it_sees_are_there():
    """The blocks of windows of the first prompt's beginning are gone when the second one comes."""
    scheduler, runner = windowed()
    output, _, _ = run(scheduler, runner, 1, LONG)
    _, cached, _ = counts(scheduler)
    assert cached < len(LONG) // 4
    assert run(scheduler, runner, 2, [*LONG, *output[:3], 1, 2])[1] == 92
    assert run(scheduler, runner, 3, [*LONG[:44], 1, 2, 3])[1] < 44


def test_a_shorter_prefix_is_found_if_a_longer_one_misses_a_block():
    scheduler, runner = windowed(num_blocks=40)
    run(scheduler, runner, 1, LONG)
    blocks = scheduler.blocks
    last = sequence_of(2, LONG)
    assert blocks.find_prefix(last).num_tokens == 89
    digests = [blocks._digest(last, count) for count in range(1, 23)]
    blocks.windowed.forget(blocks.windowed.find(digests[18]))  # tokens 72 to 75
    assert blocks.find_prefix(last).num_tokens == 89  # sees tokens from 81 on
    blocks.windowed.forget(blocks.windowed.find(digests[20]))  # tokens 80 to 83
    assert blocks.find_prefix(last).num_tokens == 72
    assert run(scheduler, runner, 3, [*LONG[:88], 1, 2, 3])[1] == 72


def test_a_crowd_with_few_blocks_of_windows():
    """Prompts are preempted in their middle, and all end."""
    scheduler, runner = windowed(num_blocks=LEAST, max_num_batched_tokens=16, chunked_prefill_size=7)
    prompts = [[n, *LONG[: 20 + 11 * n]] for n in range(6)]
    sequences = [sequence_of(n, prompt, params(30)) for n, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids[len(prompt) :] == answer(prompt, params(30), 200)
    assert scheduler.statistics(0).num_preemptions > 0
    scheduler.check_integrity()


def test_without_a_prefix_cache_nothing_is_kept():
    scheduler, runner = windowed(enable_prefix_caching=False)
    run(scheduler, runner, 1, LONG)
    assert counts(scheduler) == (LEAST, 0, 0)


def test_a_failed_sequence_is_found_in_no_window():
    """Neither its last blocks nor those behind its window, which it holds no longer."""
    scheduler, runner = windowed(num_blocks=40)
    sequence = sequence_of(1, LONG, params(9))
    scheduler.add(sequence)
    while sequence.num_output_tokens == 0:
        run_step(scheduler, runner)
    assert counts(scheduler)[1] > 10
    runner.fail_requests.add(1)
    run_all(scheduler, runner)
    assert counts(scheduler) == (40, 0, 0)


def test_an_abort_gives_the_blocks_back():
    scheduler, runner = windowed()
    scheduler.add(sequence_of(1, LONG, params(9)))
    run_step(scheduler, runner)
    scheduler.abort(1)
    assert counts(scheduler)[2] == 0
    scheduler.forget_all()
    assert counts(scheduler) == (LEAST, 0, 0)


def test_the_blocks_must_hold_one_sequence():
    with pytest.raises(ValueError, match="windows must have at least 12 blocks, got 11"):
        Limits(100, 200, 64, 4, max_num_batched_tokens=16, windows=Windows(WINDOW, LEAST - 1))
    Limits(100, 200, 5, 4, max_num_batched_tokens=16, windows=Windows(WINDOW, 5))  # no sequence has more
