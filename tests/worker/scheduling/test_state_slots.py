"""Slots of states beside keys and values: who holds them, where states are kept, and prefixes that end there."""

import pytest
from helpers.toy_driver import answer, make, params, run_all, run_step, sequence_of, shape

from trioengine.core.errors import InvariantError
from trioengine.worker.scheduling.sequence import Limits
from trioengine.worker.scheduling.state_slots import StateSlots

PROMPT = list(range(40, 58))  # 18 tokens: four blocks of 4, and two more


def stateful(**changes):
    return make(**({"state_slots": 9} | changes))


def run(scheduler, runner, request, prompt, max_tokens=4):
    """A request alone: its answer, and how many tokens were computed."""
    sequence = sequence_of(request, prompt, params(max_tokens))
    scheduler.add(sequence)
    before = runner.num_computed
    run_all(scheduler, runner)
    output = sequence.token_ids[len(prompt) :]
    assert output == answer(prompt, params(max_tokens), scheduler.limits.max_sequence_len)
    return output, sequence.num_cached_tokens, runner.num_computed - before


def counts(scheduler):
    states = scheduler.blocks.states
    return states.num_free, states.num_kept, states.num_held


@pytest.mark.parametrize("count", [1, -1])
def test_one_slot_is_for_padding(count):
    with pytest.raises(ValueError, match="state_slots must be 0 or at least 2"):
        Limits(100, 64, 8, 4, state_slots=count)


def test_the_padding_has_a_slot_that_nobody_gets():
    slots = StateSlots(4)
    assert sorted(slots.take() for _ in range(3)) == [1, 2, 3]
    assert slots.take() is None
    assert (slots.num_free, slots.num_kept, slots.num_held) == (0, 0, 3)


def test_the_state_unused_for_the_longest_time_gives_up_its_slot():
    slots = StateSlots(4)
    for block in (10, 11, 12):
        slots.keep(slots.take(), block)
    slots.touch(10)
    taken = slots.find(11)
    assert slots.take() == taken
    assert [slots.find(block) is None for block in (10, 11, 12)] == [False, True, False]


def test_slots_are_not_forgotten_while_one_is_held():
    slots = StateSlots(3)
    slots.take()
    with pytest.raises(InvariantError, match="1 state slots are held"):
        slots.forget_all()


def test_a_running_sequence_holds_a_slot_and_leaves_its_state():
    scheduler, runner = stateful()
    assert counts(scheduler) == (8, 0, 0)
    scheduler.add(sequence_of(1, PROMPT))
    run_step(scheduler, runner)
    assert counts(scheduler) == (6, 1, 1)  # kept behind the prompt's last full block
    run_all(scheduler, runner)
    assert counts(scheduler) == (6, 2, 0)  # and behind the answer


def test_the_next_turn_computes_only_its_own_tokens():
    """The latest token of an answer was never computed, so it is one more."""
    scheduler, runner = stateful(kv_blocks_total=60, max_model_len=200)
    history = list(PROMPT)
    for turn in range(10):
        new = [60 + turn, 61, 62]
        output, cached, computed = run(scheduler, runner, turn, history + new)
        assert cached == max(0, len(history) - 1 if turn else 0)
        assert computed == len(history) + len(new) - cached + len(output) - 1
        history += new + output


def test_a_turn_that_ends_with_a_full_block_is_found():
    scheduler, runner = stateful()
    output, _, _ = run(scheduler, runner, 1, PROMPT[:9], max_tokens=4)  # 12 of 13 tokens are computed
    assert run(scheduler, runner, 2, PROMPT[:9] + output + [99])[1] == 12


def test_a_repeated_prompt_begins_behind_its_last_full_block():
    scheduler, runner = stateful()
    run(scheduler, runner, 1, PROMPT)
    assert run(scheduler, runner, 2, PROMPT)[1] == 16


def test_prefixes_part_once_without_a_state():
    """The first prompt that parts from another finds no state there, and keeps one for those that follow."""
    scheduler, runner = stateful(max_model_len=100)
    common = list(range(100, 110))  # two full blocks
    cached = [run(scheduler, runner, n, common + [200 + n] * 9)[1] for n in range(4)]
    assert cached == [0, 0, 8, 8]


def test_without_a_prefix_cache_no_state_is_kept():
    scheduler, runner = stateful(enable_prefix_caching=False)
    run(scheduler, runner, 1, PROMPT)
    assert counts(scheduler) == (8, 0, 0)
    assert run(scheduler, runner, 2, PROMPT)[1] == 0


def test_a_block_that_is_evicted_gives_up_its_state():
    scheduler, runner = stateful(kv_blocks_total=6, max_model_len=24)
    run(scheduler, runner, 1, PROMPT)
    run(scheduler, runner, 2, [7] * 20)
    assert run(scheduler, runner, 3, PROMPT)[1] < 16
    assert scheduler.blocks.states.num_kept <= 4


def test_a_sequence_waits_for_a_slot():
    scheduler, runner = stateful(state_slots=3)
    for request in range(3):
        scheduler.add(sequence_of(request, [request + 1, 5], params(3)))
    assert shape(scheduler, runner) == [(0, 2), (1, 2)]
    assert shape(scheduler, runner) == [(0, 1), (1, 1)]
    assert shape(scheduler, runner) == [(0, 1), (1, 1)]
    assert shape(scheduler, runner) == [(2, 2)]
    run_all(scheduler, runner)


def test_saves_give_way_to_sequences():
    """With two slots one sequence runs at a time, and its state is kept only behind its end."""
    scheduler, runner = stateful(state_slots=2)
    for request in range(4):
        run(scheduler, runner, request, [*PROMPT, request])
    assert counts(scheduler) == (0, 1, 0)


def test_preempted_sequences_begin_again_where_a_state_is_kept():
    scheduler, runner = stateful(kv_blocks_total=12, max_model_len=40, state_slots=5)
    sequences = [sequence_of(n, [n, *PROMPT[:5]], params(30)) for n in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    assert scheduler.statistics(0).num_preemptions > 0
    for sequence in sequences:
        assert sequence.token_ids[6:] == answer([sequence.request, *PROMPT[:5]], params(30), 40)


def test_an_abort_gives_back_the_slot_and_keeps_the_state():
    scheduler, runner = stateful()
    scheduler.add(sequence_of(1, PROMPT, params(30)))
    for _ in range(4):
        run_step(scheduler, runner)
    scheduler.abort(1)
    scheduler.check_integrity()
    assert counts(scheduler)[2] == 0
    assert run(scheduler, runner, 2, PROMPT)[1] >= 16


def test_a_failed_step_keeps_no_state():
    scheduler, runner = stateful()
    runner.fail_requests.add(1)
    scheduler.add(sequence_of(1, PROMPT))
    run_all(scheduler, runner)
    scheduler.check_integrity()
    assert counts(scheduler) == (8, 0, 0)


@pytest.mark.parametrize("num_common", [8, 9, 11])
def test_a_failed_request_leaves_no_state_behind_blocks_of_others(num_common):
    """It saves one behind a block that it has in common with an earlier request, and fails in a later step."""
    scheduler, runner = stateful(max_num_batched_tokens=num_common + 1)
    common = [1] * num_common
    run(scheduler, runner, 1, [*common, *[2] * 5])
    kept = counts(scheduler)[1]
    runner.fail_requests.add(2)
    scheduler.add(sequence_of(2, [*common, *[3] * 5]))
    run_step(scheduler, runner)
    assert counts(scheduler)[1] > kept
    run_all(scheduler, runner)
    assert run(scheduler, runner, 3, [*common, *[4] * 5])[1] == 0


def test_memory_that_is_given_up_has_no_states():
    scheduler, runner = stateful()
    run(scheduler, runner, 1, PROMPT)
    scheduler.forget_all()
    assert counts(scheduler) == (8, 0, 0)
    assert run(scheduler, runner, 2, PROMPT)[1] == 0


def test_a_state_does_not_go_back_behind_drafts():
    scheduler, _ = stateful()
    sequence = sequence_of(1, PROMPT, params(4, num_speculative_tokens=5))
    scheduler.add(sequence)
    assert sequence.pace is None


def test_a_salt_has_states_of_its_own():
    scheduler, runner = stateful()
    run(scheduler, runner, 1, PROMPT)
    sequence = sequence_of(2, PROMPT, params(4, cache_salt="other"))
    scheduler.add(sequence)
    run_all(scheduler, runner)
    assert sequence.num_cached_tokens == 0
