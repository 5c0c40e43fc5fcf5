"""Paged KV memory: which blocks are free, cached or held, and which sequence's block table holds them.

A block is *held* (its reference count is above 0), *cached* (held by no sequence, kept by the prefix cache, evicted
when needed) or *free* (holds nothing): `num_free + num_cached + num_held == num_blocks`, always.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, KeysView
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from trioengine.core.errors import InvariantError
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


ROOT_DIGEST = b""  # of requests without a cache salt
_SALTED = b"cache salt"  # keeps the roots apart from the digests of blocks
_WITH_IMAGES = b"images"  # the same for blocks whose ids take 8 bytes


def root_digest(cache_salt: str) -> bytes:
    """The parent of the first block of a request with this cache salt."""
    return blake2b(cache_salt.encode(), digest_size=32, person=_SALTED).digest() if cache_salt else ROOT_DIGEST


def block_digest(parent: bytes, token_ids: Items[int]) -> bytes:
    """The digest of a full block after the prefix `parent`."""
    packed = _packed(token_ids)
    kind = b"" if packed.typecode == "i" else _WITH_IMAGES
    return blake2b(parent + packed.tobytes(), digest_size=32, person=kind).digest()


def _packed(token_ids: Items[int]) -> array[int]:
    """4 bytes a token; 8, where there are an image's among them."""
    try:
        return array("i", token_ids)
    except OverflowError:
        return array("q", token_ids)


class PartialBlock(NamedTuple):
    """A block of which only the first tokens are wanted."""

    block: int
    num_tokens: int


class _Entry(NamedTuple):
    """The content of a registered block."""

    branch: tuple[bytes, int]  # the parent's digest and the first token
    token_ids: array[int]
    digest: bytes


class PrefixCache:
    """Registered blocks by digest, and the unused ones among them in the order of eviction, oldest first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._branches: dict[tuple[bytes, int], int] = {}
        self._unused: dict[int, None] = {}  # an ordered set

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    @property
    def unused(self) -> KeysView[int]:
        return self._unused.keys()

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix's last tokens."""
        return self._blocks.get(digest)

    def find_partial(self, parent: bytes, token_ids: Items[int]) -> PartialBlock | None:
        """A block after the prefix `parent` that begins with some of these tokens."""
        block = self._branches.get((parent, token_ids[0])) if token_ids else None
        if block is None:
            return None
        held = self._entries[block].token_ids
        differing = (index for index, pair in enumerate(zip(held, token_ids, strict=False)) if pair[0] != pair[1])
        return PartialBlock(block, next(differing, min(len(held), len(token_ids))))

    def register(self, block: int, parent: bytes, token_ids: Items[int], digest: bytes) -> None:
        """Make a computed block findable; where another block holds the same prefix already, that one stays."""
        if digest not in self._blocks and block not in self._entries:
            entry = _Entry((parent, token_ids[0]), _packed(token_ids), digest)
            self._blocks[digest] = block
            self._entries[block] = entry
            self._branches[entry.branch] = block

    def is_registered(self, block: int) -> bool:
        return block in self._entries

    def is_unused(self, block: int) -> bool:
        return block in self._unused

    def mark_unused(self, block: int) -> None:
        """A registered block is held by no sequence any more: it may be evicted, after those marked before."""
        self._unused[block] = None

    def mark_used(self, block: int) -> None:
        del self._unused[block]

    def evict(self) -> int:
        """Forget the block that is unused for the longest time, and return it; KeyError when none is unused."""
        block = next(iter(self._unused), None)
        if block is None:
            raise KeyError("no block is unused")
        del self._unused[block]
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Make a block unfindable; nothing happens when it is not registered."""
        entry = self._entries.pop(block, None)
        if entry is not None:
            del self._blocks[entry.digest]
            if self._branches.get(entry.branch) == block:
                del self._branches[entry.branch]

    def find_disagreement(self) -> str | None:
        """Return a disagreement among the maps, or None."""
        entries = self._entries
        found = [self._blocks.get(entry.digest) for entry in entries.values()]
        if found != list(entries) or len(self._blocks) != len(entries):
            return "the prefix cache's maps of blocks and digests are not each other's inverse"
        if any(block not in entries or entries[block].branch != branch for branch, block in self._branches.items()):
            return "the prefix cache finds a block by tokens that it does not hold"
        if not self._unused.keys() <= self._entries.keys():
            return "the prefix cache keeps blocks that hold no prefix"
        return None
