"""Blocks of the KV cache: which are free, cached or held, and which of them hold which prefix.

A block is *held* (in a sequence's block table; its reference count is above 0), *cached* (held by no sequence, its
content findable, evicted when needed) or *free*: `num_free + num_cached + num_held == num_blocks`, always.

The prefix cache is an index of computed full blocks, held or not. A block is found by a digest of its tokens and of the
digest of the block before it, so that equal digests mean equal prefixes (the scheme of vLLM's automatic prefix
caching). The first block's parent is the root of the request's cache salt and adapter: requests that differ in one of
them find none of each other's blocks, neither whole nor in part.

Where prefixes part within a block, as after a chat template's first words, their common tokens are found by the parent
and the first token: of several blocks with these, the latest. They are copied to a block of the new sequence.

A model with states beside keys and values (state_slots.py) can only go on where a state is kept: behind a block, which
may be one that a sequence has left half full. There a prefix ends. The states of a sequence are kept behind its last
token, when it leaves; behind the last full block of its prompt; and behind the last of the full blocks that it has in
common with an earlier sequence, where that has kept none.

The tokens of an image stand for its content: the index compares `Sequence.content`, which has ids in their places that
are not in the vocabulary (see `image_token_ids`), so that different images never match.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from trioengine.core.errors import InvariantError
from trioengine.core.messages import NO_ADAPTER
from trioengine.worker.scheduling.sequence import BlockCopy, Sequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy, StateSave, StateSlots

ROOT_DIGEST = b""  # of requests without a cache salt
_SALTED = b"cache salt"  # keeps the roots apart from the digests of blocks
_WITH_IMAGES = b"images"  # the same for blocks whose ids take 8 bytes


class Prefix(NamedTuple):
    """The cached part of a sequence: whole blocks, and perhaps the first tokens of one more."""

    blocks: tuple[int, ...] = ()
    partial: int | None = None  # the one more, to be copied as far as it matches
    num_tokens: int = 0  # of `blocks` and of the copy
    state_slot: int = PADDING_SLOT  # with the state behind these tokens; the padding's: there is none
    num_found: int = 0  # tokens of full blocks in the cache, of which a state may be missing


class _Content(NamedTuple):
    """The content of a findable block."""

    digest: bytes
    branch: tuple[bytes, int]  # the parent's digest and the first token
    token_ids: array[int]


class BlockManager:
    """Gives blocks and state slots to sequences and takes them back; the only one to change a block table."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, num_state_slots: int = 0
    ) -> None:
        """`num_state_slots`: 0 for a model without states."""
        self.num_blocks = num_blocks
        self.states = StateSlots(num_state_slots)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is used again first
        self._cached: dict[int, None] = {}  # an ordered set: the block to be evicted first comes first
        self._contents: dict[int, _Content] = {}  # of the findable blocks, cached or held
        self._by_digest: dict[bytes, int] = {}  # all of them
        self._by_branch: dict[tuple[bytes, int], int] = {}  # the latest of each branch
        self._copies: list[BlockCopy] = []
        self._state_copies: list[StateCopy] = []
        self._saving: set[int] = set()  # slots to which the running step saves states

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds, kept for the prefix cache."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix of the sequence that is found in the cache, up to its `max_prefix`; takes no block.

        At least one token is left to compute, because the next token is sampled from its logits.
        """
        if not self.enable_prefix_caching:
            return Prefix()
        last, size = sequence.max_prefix, self.block_size
        found: list[int] = []
        for index in range(last // size):
            block = self._by_digest.get(self._digest(sequence, index + 1))
            if block is None:
                break
            found.append(block)
        num_tokens = len(found) * size
        rest = sequence.content(num_tokens, min(num_tokens + size, last))
        partial = self._by_branch.get((self._digest(sequence, len(found)), rest[0])) if rest else None
        if self.states:
            return self._with_state(found, partial, rest)
        if partial is not None:
            for ours, theirs in zip(rest, self._contents[partial].token_ids, strict=False):
                if ours != theirs:
                    break
                num_tokens += 1
        return Prefix(tuple(found), partial, num_tokens)

    def _with_state(self, found: list[int], partial: int | None, rest: list[int]) -> Prefix:
        """The longest prefix of which a state is kept; `rest` are the tokens behind the full blocks `found`."""
        num_found = len(found) * self.block_size
        if partial is not None and (slot := self.states.find(partial)) is not None:
            token_ids = self._contents[partial].token_ids.tolist()
            if token_ids == rest[: len(token_ids)]:
                return Prefix(tuple(found), partial, num_found + len(token_ids), slot, num_found)
        for count in range(len(found), 0, -1):
            if (slot := self.states.find(found[count - 1])) is not None:
                return Prefix(tuple(found[:count]), None, count * self.block_size, slot, num_found)
        return Prefix(num_found=num_found)

    def allocate(self, sequence: Sequence, prefix: Prefix, *, reserve: int = 0) -> bool:
        """Give an empty sequence `prefix` (see `find_prefix`), blocks for the rest of its tokens, and a state slot.

        False, and nothing changes, where that would leave fewer than `reserve` blocks for others, or all slots are
        held. The tokens of `prefix` count as computed; in its partial block they are, once the step has made
        `take_copies` and `take_state_copies`.
        """
        num_new = -(-sequence.num_tokens // self.block_size) - len(prefix.blocks)
        num_revived = len(self._cached.keys() & prefix.blocks)
        if len(self._free) + len(self._cached) - num_revived - num_new < reserve:
            return False
        if self.states and not self._take_state(sequence, prefix):
            return False
        for block in prefix.blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1
        sequence.block_table.extend(prefix.blocks)
        self.grow(sequence)
        if prefix.partial is not None:
            num_copied = prefix.num_tokens - len(prefix.blocks) * self.block_size
            self._copies.append(BlockCopy(prefix.partial, sequence.block_table[len(prefix.blocks)], num_copied))
        sequence.num_computed_tokens = prefix.num_tokens
        return True

    def _take_state(self, sequence: Sequence, prefix: Prefix) -> bool:
        if prefix.state_slot != PADDING_SLOT:
            self.states.touch(prefix.blocks[-1] if prefix.partial is None else prefix.partial)
        slot = self.states.take()
        if slot is None:
            return False
        sequence.state_slot = slot
        self._state_copies.append(StateCopy(prefix.state_slot, slot))
        if self.enable_prefix_caching:
            last_block = (sequence.num_tokens - 1) // self.block_size * self.block_size
            points = sorted({prefix.num_found, last_block})
            sequence.save_points = tuple(point for point in points if point > prefix.num_tokens)
        return True

    def take_state_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies of states that the next step makes first, as `take_copies` does."""
        copies, self._state_copies = tuple(self._state_copies), []
        return copies

    def begin_saves(self, sequence: Sequence, num_new_tokens: int) -> tuple[StateSave, ...]:
        """Take slots for the states that a step with these tokens saves, as far as there are slots.

        They are given to `finish_saves` when the step is computed.
        """
        start, saves = sequence.num_computed_tokens, []
        for point in sequence.save_points:
            if start < point <= start + num_new_tokens and (slot := self.states.take()) is not None:
                self._saving.add(slot)
                saves.append(StateSave(slot, point))
        return tuple(saves)

    def finish_saves(self, sequence: Sequence, saves: Items[StateSave], *, discard: bool = False) -> None:
        """Keep the states that a step has saved, or discard them, where they may be wrong."""
        for slot, num_tokens in saves:
            self._saving.remove(slot)
            if discard:
                self.states.give_back(slot)
            else:
                self.states.keep(slot, self._findable(sequence, num_tokens))

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that the next step makes first: all sources are read before a target changes."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def grow(self, sequence: Sequence) -> bool:
        """Make the block table hold all tokens; False, and nothing changes, when there are too few blocks.

        Free blocks are taken first; then cached ones are evicted, the one that is unused for the longest time first.
        """
        num_new = -(-sequence.num_tokens // self.block_size) - len(sequence.block_table)
        if num_new > len(self._free) + len(self._cached):
            return False
        for _ in range(num_new):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._forget(block)
            self._ref_counts[block] = 1
            sequence.block_table.append(block)
        return True

    def register(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks findable that were filled by computing the tokens from `num_computed_before` on.

        Where another block holds the same prefix already, that one stays.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(num_computed_before // size, sequence.num_computed_tokens // size):
            block, digest = sequence.block_table[index], self._digest(sequence, index + 1)
            if digest not in self._by_digest and block not in self._contents:
                token_ids = _packed(sequence.content(index * size, (index + 1) * size))
                self._add(block, _Content(digest, (self._digest(sequence, index), token_ids[0]), token_ids))

    def _add(self, block: int, content: _Content) -> None:
        """Make a block findable. Where a state is needed, only half full blocks are found by their first token."""
        self._contents[block] = content
        self._by_digest[content.digest] = block
        if not self.states or len(content.token_ids) < self.block_size:
            self._by_branch[content.branch] = block

    def _keep_state(self, sequence: Sequence) -> None:
        """Keep the state behind the sequence's last computed token, and make its last block findable."""
        slot, num_tokens = sequence.state_slot, sequence.num_computed_tokens
        sequence.state_slot = PADDING_SLOT
        if self.enable_prefix_caching and num_tokens > 0:
            self.states.keep(slot, self._findable(sequence, num_tokens))
        else:
            self.states.give_back(slot)

    def _findable(self, sequence: Sequence, num_tokens: int) -> int:
        """The block by which so many computed tokens of the sequence are found: its own where there is none yet."""
        index = (num_tokens - 1) // self.block_size
        token_ids, parent = (
            _packed(sequence.content(index * self.block_size, num_tokens)),
            self._digest(sequence, index),
        )
        content = _Content(block_digest(parent, token_ids), (parent, token_ids[0]), token_ids)
        if content.digest not in self._by_digest:
            self._add(sequence.block_table[index], content)
        return self._by_digest[content.digest]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; of those that stay cached, the later ones of the prefix are evicted first."""
        if sequence.state_slot != PADDING_SLOT:
            self._keep_state(sequence)
        for block in reversed(sequence.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._contents:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def discard(self, sequence: Sequence) -> None:
        """Take all blocks back, and make them unfindable: their content may be wrong (not finite, say)."""
        if sequence.state_slot != PADDING_SLOT:
            self.states.give_back(sequence.state_slot)
            sequence.state_slot = PADDING_SLOT
        for block in sequence.block_table:
            self._forget(block)
        if self.states:
            for found in self._beside(sequence):
                self.states.forget(found)
        self.release(sequence)

    def _beside(self, sequence: Sequence) -> Iterator[int]:
        """Blocks of others by which the sequence's prefixes are found, whose states may be its own."""
        for index in range((sequence.num_tokens - 1) // self.block_size + 1):
            parent, first = self._digest(sequence, index), index * self.block_size
            branch = parent, sequence.content(first, first + 1)[0]
            found = self._by_digest.get(parent), self._by_branch.get(branch)
            yield from (block for block in found if block is not None)

    def forget_all(self) -> None:
        """Make all blocks free and unfindable. Raises InvariantError while a sequence holds one."""
        if self.num_held:
            raise InvariantError(f"{self.num_held} blocks are held, and are to be forgotten")
        self._free = list(range(self.num_blocks - 1, -1, -1))
        for index in (self._cached, self._contents, self._by_digest, self._by_branch):
            index.clear()
        self.states.forget_all()

    def check_integrity(self, sequences: Items[Sequence]) -> None:
        """Raise InvariantError unless the accounts agree with the block tables of `sequences`: all there are.

        Takes some 0.4 s for a million blocks.
        """
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        for block, count in held.items():
            if self._ref_counts[block] != count:
                raise InvariantError(f"block {block} is counted {self._ref_counts[block]} times and held {count} times")
        if sum(self._ref_counts) != held.total():
            raise InvariantError(f"blocks are counted {sum(self._ref_counts)} times and held {held.total()} times")
        self._check_index()
        slots = [sequence.state_slot for sequence in sequences if sequence.state_slot != PADDING_SLOT]
        self.states.check_integrity([*slots, *self._saving], self._contents)
        accounted = {*self._free, *self._cached, *held}
        num_accounted = len(self._free) + len(self._cached) + len(held)
        if len(accounted) != self.num_blocks or num_accounted != self.num_blocks:
            raise InvariantError(
                f"of {self.num_blocks} blocks {len(accounted)} are accounted for: "
                f"{len(self._free)} free + {len(self._cached)} cached + {len(held)} held"
            )

    def _check_index(self) -> None:
        contents = self._contents
        found = [self._by_digest.get(content.digest) for content in contents.values()]
        if found != list(contents) or len(self._by_digest) != len(contents):
            raise InvariantError("the prefix cache's maps of blocks and digests are not each other's inverse")
        for branch, block in self._by_branch.items():
            if block not in contents or contents[block].branch != branch:
                raise InvariantError("the prefix cache finds a block by tokens that it does not hold")
        if not self._cached.keys() <= contents.keys():
            raise InvariantError("the prefix cache keeps blocks that hold no prefix")

    def _forget(self, block: int) -> None:
        """Make a block unfindable; nothing happens if it already is."""
        content = self._contents.pop(block, None)
        if content is not None:
            self.states.forget(block)
            del self._by_digest[content.digest]
            if self._by_branch.get(content.branch) == block:
                del self._by_branch[content.branch]

    def _digest(self, sequence: Sequence, num_blocks: int) -> bytes:
        """The digest of the sequence's first full blocks; of none, its root. Computed once each."""
        digests = sequence.block_digests
        if not digests:
            digests.append(root_digest(sequence.params.cache_salt, sequence.adapter))
        while len(digests) <= num_blocks:
            end = len(digests) * self.block_size
            digests.append(block_digest(digests[-1], sequence.content(end - self.block_size, end)))
        return digests[num_blocks]


def root_digest(cache_salt: str, adapter: int = NO_ADAPTER) -> bytes:
    """The parent of the first block of a request with this cache salt, and an adapter of this number."""
    if not cache_salt and adapter == NO_ADAPTER:
        return ROOT_DIGEST
    salt = adapter.to_bytes(8, "little")
    return blake2b(cache_salt.encode(), digest_size=32, person=_SALTED, salt=salt).digest()


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
