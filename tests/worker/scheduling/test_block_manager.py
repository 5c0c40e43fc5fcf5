"""The block manager and the prefix cache: counts, sharing, eviction, and books that notice being cooked."""

from __future__ import annotations

import pytest
from helpers.toy_driver import sequence_of

from trioengine.core.errors import InvariantError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.scheduling.block_manager import BlockManager, Prefix
from trioengine.worker.scheduling.block_pool import ROOT_DIGEST, block_digest, root_digest
from trioengine.worker.scheduling.sequence import BlockCopy, Sequence

BLOCK_SIZE = 4


def counts(blocks: BlockManager) -> tuple[int, int, int]:
    return blocks.full.num_free, blocks.full.num_cached, blocks.full.num_held


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    """All tokens are computed now."""
    before = sequence.num_computed_tokens
    sequence.num_computed_tokens = sequence.num_tokens
    blocks.register(sequence, before)


def computed(blocks: BlockManager, request: int, prompt: list[int]) -> Sequence:
    sequence = sequence_of(request, prompt)
    assert blocks.allocate(sequence, blocks.find_prefix(sequence))
    compute(blocks, sequence)
    return sequence


def test_only_full_blocks_stay_cached() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    sequence = computed(blocks, 1, list(range(10)))
    assert counts(blocks) == (5, 0, 3)
    blocks.release(sequence)
    assert counts(blocks) == (6, 2, 0)
    assert len(sequence.block_table) == 0
    blocks.check_integrity([])


def test_a_prefix_is_shared_while_held_and_found_after_release() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    first = computed(blocks, 1, list(range(10)))
    second = computed(blocks, 2, [*range(8), 30, 31])
    assert second.block_table[:2] == first.block_table[:2]
    assert counts(blocks) == (4, 0, 4)
    blocks.check_integrity([first, second])
    blocks.release(first)
    blocks.release(second)
    third = sequence_of(3, list(range(10)))
    assert len(blocks.find_prefix(third).blocks) == 2
    assert blocks.allocate(third, blocks.find_prefix(third))
    assert third.num_computed_tokens == 8


def test_one_token_is_always_left_to_compute() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    blocks.release(computed(blocks, 1, list(range(8))))
    assert len(blocks.find_prefix(sequence_of(2, list(range(8)))).blocks) == 1
    assert len(blocks.find_prefix(sequence_of(3, list(range(9)))).blocks) == 2


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    blocks.release(computed(blocks, 1, [1, 1, 1, 1, 5, 5, 5, 5, 9]))
    assert blocks.find_prefix(sequence_of(2, [2, 2, 2, 2, 5, 5, 5, 5, 9])) == Prefix()
    assert block_digest(ROOT_DIGEST, [1, 2]) != block_digest(block_digest(ROOT_DIGEST, [1]), [2])


def test_what_prefixes_share_within_a_block_is_copied() -> None:
    """As after a chat template's first words: the block of the one is copied for the other, which computes the rest."""
    blocks = BlockManager(8, BLOCK_SIZE)
    first = computed(blocks, 1, [*range(6), 10, 11, 12])
    second = sequence_of(2, [*range(6), 20, 21])
    prefix = blocks.find_prefix(second)
    assert prefix == Prefix((first.block_table[0],), first.block_table[1], num_tokens=6)
    assert blocks.allocate(second, prefix)
    assert second.num_computed_tokens == 6
    assert second.block_table[0] == first.block_table[0]
    assert blocks.take_copies() == (BlockCopy(first.block_table[1], second.block_table[1], 2),)
    assert blocks.take_copies() == ()
    compute(blocks, second)
    assert blocks.find_prefix(sequence_of(3, [*range(6), 20, 21, 5])).blocks == tuple(second.block_table)
    blocks.check_integrity([first, second])


def test_the_latest_of_blocks_that_begin_alike_is_copied_from() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    first, second = computed(blocks, 1, [1, 2, 3, 4]), computed(blocks, 2, [1, 2, 5, 6])
    assert blocks.find_prefix(sequence_of(3, [1, 2, 3, 7])) == Prefix((), second.block_table[0], num_tokens=2)
    blocks.discard(second)
    assert blocks.find_prefix(sequence_of(3, [1, 2, 3, 7])) == Prefix()
    assert blocks.find_prefix(sequence_of(4, [1, 2, 3, 4, 7])) == Prefix((first.block_table[0],), num_tokens=4)
    blocks.discard(first)
    assert counts(blocks) == (8, 0, 0)


def test_a_prompt_of_whole_blocks_is_copied_but_for_its_last_token() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    first = computed(blocks, 1, list(range(8)))
    whole, copied = first.block_table
    assert blocks.find_prefix(sequence_of(2, list(range(8)))) == Prefix((whole,), copied, num_tokens=7)


def test_a_block_is_copied_that_is_evicted_for_the_copy() -> None:
    """It is read before anything is written."""
    blocks = BlockManager(1, BLOCK_SIZE)
    first = computed(blocks, 1, [1, 2, 3, 4])
    blocks.release(first)
    second = sequence_of(2, [1, 2, 5, 6])
    assert blocks.allocate(second, blocks.find_prefix(second))
    assert blocks.take_copies() == (BlockCopy(0, 0, 2),)
    compute(blocks, second)
    blocks.check_integrity([second])


def test_later_blocks_of_a_prefix_are_evicted_first_and_older_prefixes_before_newer() -> None:
    blocks = BlockManager(6, BLOCK_SIZE)
    blocks.release(computed(blocks, 1, [1] * 12))
    blocks.release(computed(blocks, 2, [2] * 12))
    assert counts(blocks) == (0, 6, 0)
    assert blocks.allocate(sequence_of(3, [3] * 8), Prefix())
    assert len(blocks.find_prefix(sequence_of(4, [1] * 13)).blocks) == 1
    assert len(blocks.find_prefix(sequence_of(5, [2] * 13)).blocks) == 3


def test_a_block_computed_twice_is_registered_once() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    first, second = sequence_of(1, [7] * 5), sequence_of(2, [7] * 5)
    for sequence in (first, second):
        assert blocks.allocate(sequence, Prefix())
    for sequence in (first, second):
        compute(blocks, sequence)
    assert set(first.block_table).isdisjoint(second.block_table)
    blocks.release(second)
    assert counts(blocks) == (6, 0, 2)
    blocks.release(first)
    assert counts(blocks) == (7, 1, 0)
    blocks.check_integrity([])


def test_nothing_changes_where_blocks_do_not_suffice() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    first = computed(blocks, 1, [1] * 12)
    late = sequence_of(2, [2] * 8)
    assert not blocks.allocate(late, Prefix())
    assert len(late.block_table) == 0
    first.token_ids += [1] * 12
    assert not blocks.grow(first)
    assert len(first.block_table) == 3
    assert counts(blocks) == (1, 0, 3)
    assert not blocks.allocate(sequence_of(3, [3]), Prefix(), reserve=1)
    assert blocks.allocate(sequence_of(4, [4]), Prefix())


def test_blocks_that_are_revived_do_not_count_as_available() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    blocks.release(computed(blocks, 1, [1] * 8))
    longer = sequence_of(2, [1] * 16)
    prefix = blocks.find_prefix(longer)
    assert len(prefix.blocks) == 2
    assert not blocks.allocate(longer, prefix)
    assert counts(blocks) == (1, 2, 0)


def test_what_is_discarded_is_found_by_nobody() -> None:
    blocks = BlockManager(8, BLOCK_SIZE)
    first, second = computed(blocks, 1, [1] * 9), computed(blocks, 2, [1] * 9)
    blocks.discard(second)
    assert blocks.find_prefix(sequence_of(3, [1] * 9)) == Prefix()
    blocks.release(first)
    assert counts(blocks) == (8, 0, 0)
    blocks.check_integrity([])


def test_caching_can_be_off() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    blocks.release(computed(blocks, 1, [1] * 9))
    assert counts(blocks) == (8, 0, 0)
    assert blocks.find_prefix(sequence_of(2, [1] * 9)) == Prefix()


def _leak(blocks: BlockManager, sequence: Sequence) -> None:
    sequence.block_table.pop()


def _free_twice(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.full._free.append(blocks.full._free[0])


def _free_while_held(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.full._free.append(sequence.block_table[0])


def _share_without_counting(blocks: BlockManager, sequence: Sequence) -> None:
    sequence.block_table.append(sequence.block_table[0])


def _lose_a_digest(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.full._by_digest.popitem()


def _keep_what_holds_nothing(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.full._cached[blocks.full._free.pop()] = None


def _branch_to_a_block_that_holds_nothing(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.full._by_branch[ROOT_DIGEST, 7] = blocks.full._free[0]


@pytest.mark.parametrize(
    "harm",
    [
        _branch_to_a_block_that_holds_nothing,
        _leak,
        _free_twice,
        _free_while_held,
        _share_without_counting,
        _lose_a_digest,
        _keep_what_holds_nothing,
    ],
)
def test_integrity_notices(harm) -> None:  # type: ignore[no-untyped-def]
    blocks = BlockManager(8, BLOCK_SIZE)
    sequence = computed(blocks, 1, [1] * 9)
    blocks.check_integrity([sequence])
    harm(blocks, sequence)
    with pytest.raises(InvariantError):
        blocks.check_integrity([sequence])


def salted(request: int, prompt: list[int], cache_salt: str) -> Sequence:
    return sequence_of(request, prompt, ResolvedParams(max_tokens=4, seed=1, cache_salt=cache_salt))


def test_a_salt_finds_only_its_own_blocks() -> None:
    """Neither whole blocks nor the first tokens of one."""
    blocks = BlockManager(8, BLOCK_SIZE)
    prompt = list(range(10))
    first = salted(1, prompt, "a")
    assert blocks.allocate(first, blocks.find_prefix(first))
    compute(blocks, first)
    for other in ("", "b", "a ", "aa"):
        assert blocks.find_prefix(salted(2, prompt, other)) == Prefix()
        assert blocks.find_prefix(salted(2, prompt[:3], other)) == Prefix()
    assert len(blocks.find_prefix(salted(3, prompt, "a")).blocks) == 2
    assert blocks.find_prefix(salted(3, prompt[:3], "a")) == Prefix((), first.block_table[0], num_tokens=2)


def test_roots_and_digests_of_blocks_are_of_different_kinds() -> None:
    """A salt cannot spell the digest of a block, nor the tokens of one."""
    tokens = [0x41414141] * BLOCK_SIZE
    spelled = "A" * 4 * BLOCK_SIZE
    assert root_digest("") == ROOT_DIGEST
    assert root_digest(spelled) != block_digest(ROOT_DIGEST, tokens)
    assert len({root_digest(salt) for salt in ("", "a", "b", "ab", "a\0b", spelled)}) == 6
    assert len(root_digest("a")) == len(block_digest(ROOT_DIGEST, tokens))
