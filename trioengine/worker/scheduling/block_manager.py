"""Paged KV memory: which blocks are free, cached or held, and which sequence's block table holds them.

A block is *held* (its reference count is above 0), *cached* (held by no sequence, kept by the prefix cache, evicted
when needed) or *free* (holds nothing): `num_free + num_cached + num_held == num_blocks`, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from trioengine.core.errors import InvariantError
from trioengine.worker.scheduling.prefix_cache import PartialBlock, PrefixCache, block_digest, root_digest
from trioengine.worker.scheduling.sequence import BlockCopy, Sequence


class Prefix(NamedTuple):
    """The cached part of a sequence: whole blocks, and perhaps the first tokens of the block after them."""

    blocks: tuple[int, ...] = ()
    partial: PartialBlock | None = None


class BlockManager:
    """Gives blocks to sequences and takes them back; the only one to change a block table."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is used again first
        self._cache = PrefixCache()
        self._copies: list[BlockCopy] = []

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds, kept for the prefix cache."""
        return self._cache.num_unused

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix of the sequence that is found in the cache, short of its last token; changes nothing.

        At least one token is left to compute, because the next token is sampled from its logits.
        """
        if not self.enable_prefix_caching:
            return Prefix()
        found: list[int] = []
        for index in range((sequence.num_tokens - 1) // self.block_size):
            block = self._cache.find(self._digest(sequence, index + 1))
            if block is None:
                break
            found.append(block)
        start = len(found) * self.block_size
        rest = sequence.content(start, min(start + self.block_size, sequence.num_tokens - 1))
        return Prefix(tuple(found), self._cache.find_partial(self._digest(sequence, len(found)), rest))

    def num_tokens_of(self, prefix: Prefix) -> int:
        return len(prefix.blocks) * self.block_size + (prefix.partial.num_tokens if prefix.partial else 0)

    def allocate(self, sequence: Sequence, prefix: Prefix, *, reserve: int = 0) -> bool:
        """Give an empty sequence `prefix` (see `find_prefix`) and blocks for the rest of its tokens.

        False, and nothing changes, where that would leave fewer than `reserve` blocks for others. The tokens of
        `prefix` count as computed; in its partial block they are, once the step has made `take_copies`.
        """
        num_new = self.num_blocks_for(sequence.num_tokens) - len(prefix.blocks)
        num_revived = sum(1 for block in prefix.blocks if self._cache.is_unused(block))
        if self.num_free + self.num_cached - num_revived - num_new < reserve:
            return False
        for block in prefix.blocks:
            if self._cache.is_unused(block):
                self._cache.mark_used(block)
            self._ref_counts[block] += 1
        sequence.block_table.extend(prefix.blocks)
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        if prefix.partial is not None:
            source, num_tokens = prefix.partial
            self._copies.append(BlockCopy(source, sequence.block_table[len(prefix.blocks)], num_tokens))
        sequence.num_computed_tokens = self.num_tokens_of(prefix)
        return True

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that the next step makes first: all sources are read before a target changes."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def grow(self, sequence: Sequence) -> bool:
        """Make the block table hold all tokens; False, and nothing changes, when there are too few blocks."""
        num_new = self.num_blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if num_new > self.num_free + self.num_cached:
            return False
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        return True

    def register(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks findable that were filled by computing the tokens from `num_computed_before` on."""
        if self.enable_prefix_caching:
            for index in range(num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size):
                parent, digest = self._digest(sequence, index), self._digest(sequence, index + 1)
                token_ids = sequence.content(index * self.block_size, (index + 1) * self.block_size)
                self._cache.register(sequence.block_table[index], parent, token_ids, digest)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; of those that stay cached, the later ones of the prefix are evicted first."""
        for block in reversed(sequence.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._cache.is_registered(block):
                    self._cache.mark_unused(block)
                else:
                    self._free.append(block)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def discard(self, sequence: Sequence) -> None:
        """Take all blocks back, and make them unfindable: their content may be wrong (not finite, say)."""
        for block in sequence.block_table:
            self._cache.forget(block)
        self.release(sequence)

    def forget_all(self) -> None:
        """Make all blocks free and unfindable. Raises InvariantError while a sequence holds one."""
        if self.num_held:
            raise InvariantError(f"{self.num_held} blocks are held, and are to be forgotten")
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cache = PrefixCache()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantError unless the accounts agree with the block tables of `sequences`: all there are.

        Takes some 0.4 s for a million blocks.
        """
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        for block, count in held.items():
            if self._ref_counts[block] != count:
                raise InvariantError(f"block {block} is counted {self._ref_counts[block]} times and held {count} times")
        if sum(self._ref_counts) != held.total():
            raise InvariantError(f"blocks are counted {sum(self._ref_counts)} times and held {held.total()} times")
        disagreement = self._cache.find_disagreement()
        if disagreement is not None:
            raise InvariantError(disagreement)
        accounted = set(self._free)
        accounted.update(self._cache.unused, held)
        num_accounted = self.num_free + self.num_cached + len(held)
        if len(accounted) != self.num_blocks or num_accounted != self.num_blocks:
            raise InvariantError(
                f"of {self.num_blocks} blocks {len(accounted)} are accounted for: "
                f"{self.num_free} free + {self.num_cached} cached + {len(held)} held"
            )

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._ref_counts[block] = 1
        return block

    def _digest(self, sequence: Sequence, num_blocks: int) -> bytes:
        """The digest of the sequence's first full blocks; of none, the root of its cache salt."""
        digests = sequence.block_digests
        if not digests:
            digests.append(root_digest(sequence.params.cache_salt))
        while len(digests) <= num_blocks:
            end = len(digests) * self.block_size
            digests.append(block_digest(digests[-1], sequence.content(end - self.block_size, end)))
        return digests[num_blocks]
