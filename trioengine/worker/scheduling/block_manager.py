"""Gives blocks of the KV cache and state slots to sequences, and finds prefixes that are computed already.

All layers that see the whole context share blocks, of which a sequence has one for each `block_size` tokens, in its
`block_table`. Layers with a sliding window have blocks of their own where the kernels read these by tables of their own
(`Windows`): in its `window_table` a sequence has those that its next tokens see, and gives the others back.

The prefix cache is an index of computed full blocks (block_pool.py). The first block's parent is the root of the
request's cache salt and adapter: requests that differ in one of them find none of each other's blocks, neither whole
nor in part.

Where prefixes part within a block, as after a chat template's first words, their common tokens are found by the parent
and the first token: of several blocks with these, the latest. They are copied to a block of the new sequence.

With windows a prefix ends at a token for which the blocks that it sees are there in both kinds of layers. Of a sequence
that leaves, these are evicted last.

A model with states beside keys and values (state_slots.py) can only go on where a state is kept: behind a block, which
may be one that a sequence has left half full. There a prefix ends. The states of a sequence are kept behind its last
token, when it leaves; behind the last full block of its prompt; and behind the last of the full blocks that it has in
common with an earlier sequence, where that has kept none.

The tokens of an image stand for its content: the index compares `Sequence.content`, which has ids in their places that
are not in the vocabulary (see `image_token_ids`), so that different images never match.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from trioengine.worker.scheduling.block_pool import BlockPool, Content, block_digest, packed, root_digest
from trioengine.worker.scheduling.sequence import NO_WINDOWS, BlockCopy, Sequence, Windows
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy, StateSave, StateSlots


class Prefix(NamedTuple):
    """The cached part of a sequence: whole blocks, and perhaps the first tokens of one more."""

    blocks: tuple[int, ...] = ()
    partial: int | None = None  # the one more, to be copied as far as it matches
    num_tokens: int = 0  # of `blocks` and of the copy
    state_slot: int = PADDING_SLOT  # with the state behind these tokens; PADDING_SLOT if no state is kept
    num_found: int = 0  # tokens of full blocks in the cache, of which a state may be missing
    window_blocks: tuple[int, ...] = ()  # the last of the whole blocks, as far as the next token sees
    window_partial: int | None = None  # the one more


class BlockManager:
    """Gives blocks and state slots to sequences and takes them back; the only one to change a block table."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_state_slots: int = 0,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        """`num_state_slots`: 0 for a model without states."""
        self.states = StateSlots(num_state_slots)
        self.full = BlockPool(num_blocks, self.states.forget)  # of the layers that see the whole context
        self.windowed = BlockPool(windows.num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._window, self._has_windows = windows.size, bool(windows)
        self._copies: list[BlockCopy] = []
        self._window_copies: list[BlockCopy] = []
        self._state_copies: list[StateCopy] = []
        self._saving: set[int] = set()  # slots to which the running step saves states

    @property
    def num_left(self) -> int:
        """Blocks that can be taken for layers that see the whole context."""
        return self.full.num_left()

    # ---- prefixes ---------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix of the sequence that is found in the cache, up to its `max_prefix`; takes no block.

        At least one token is left to compute, because the next token is sampled from its logits.
        """
        if not self.enable_prefix_caching:
            return Prefix()
        last, size = sequence.max_prefix, self.block_size
        found: list[int] = []
        for index in range(last // size):
            block = self.full.find(self._digest(sequence, index + 1))
            if block is None:
                break
            found.append(block)
        num_tokens = len(found) * size
        rest = sequence.content(num_tokens, min(num_tokens + size, last))
        partial = self.full.find_branch(self._digest(sequence, len(found)), rest[0]) if rest else None
        if self.states:
            return self._with_state(found, partial, rest)
        if partial is not None:
            for ours, theirs in zip(rest, self.full.contents[partial].token_ids, strict=False):
                if ours != theirs:
                    break
                num_tokens += 1
        prefix = Prefix(tuple(found), partial, num_tokens)
        return self._with_windows(sequence, prefix) if self._has_windows else prefix

    def _with_state(self, found: list[int], partial: int | None, rest: list[int]) -> Prefix:
        """The longest prefix of which a state is kept; `rest` are the tokens behind the full blocks `found`."""
        num_found = len(found) * self.block_size
        if partial is not None and (slot := self.states.find(partial)) is not None:
            token_ids = self.full.contents[partial].token_ids.tolist()
            if token_ids == rest[: len(token_ids)]:
                return Prefix(tuple(found), partial, num_found + len(token_ids), slot, num_found)
        for count in range(len(found), 0, -1):
            if (slot := self.states.find(found[count - 1])) is not None:
                return Prefix(tuple(found[:count]), None, count * self.block_size, slot, num_found)
        return Prefix(num_found=num_found)

    def _with_windows(self, sequence: Sequence, prefix: Prefix) -> Prefix:
        """The longest part of a prefix of which there are the blocks of windows that its next token sees."""
        if prefix.partial is not None:
            last = self.windowed.find(self.full.contents[prefix.partial].digest)
            first = self._first_kept(prefix.num_tokens)
            blocks = self._window_blocks(sequence, first, len(prefix.blocks))
            if last is not None and len(blocks) == len(prefix.blocks) - first:
                return prefix._replace(window_blocks=blocks, window_partial=last)
        count = len(prefix.blocks)
        while count > 0:
            first = self._first_kept(count * self.block_size)
            blocks = self._window_blocks(sequence, first, count)
            if len(blocks) == count - first:
                return Prefix(prefix.blocks[:count], num_tokens=count * self.block_size, window_blocks=blocks)
            count -= len(blocks) + 1  # the block before these is missing, and longer prefixes need it as well
        return Prefix()

    def _window_blocks(self, sequence: Sequence, first: int, stop: int) -> tuple[int, ...]:
        """Of the sequence's blocks from `first` to `stop` the last ones, up to the first that is missing."""
        blocks: list[int] = []
        for index in range(stop - 1, first - 1, -1):
            block = self.windowed.find(self._digest(sequence, index + 1))
            if block is None:
                break
            blocks.append(block)
        return tuple(reversed(blocks))

    def _first_kept(self, num_computed_tokens: int) -> int:
        """The index of the first block that a token behind the last full block sees in a window.

        Where the sequence ends, the prefix of its next turn ends there.
        """
        in_full_blocks = num_computed_tokens // self.block_size * self.block_size
        return max(0, in_full_blocks + 1 - self._window) // self.block_size

    # ---- blocks of sequences ----------------------------------------------------------------------------------------

    def allocate(
        self, sequence: Sequence, prefix: Prefix, num_new_tokens: int | None = None, *, reserve: int = 0
    ) -> bool:
        """Give an empty sequence `prefix` (see `find_prefix`), blocks for the rest of its tokens, and a state slot.

        Of blocks of windows it gets those for its next `num_new_tokens`, or for all. False, and nothing changes, where
        that would leave fewer than `reserve` blocks for others, or all slots are held. The tokens of `prefix` count as
        computed; in its partial block they are, once the step has made the copies.
        """
        num_computed = prefix.num_tokens
        num_tokens = sequence.num_tokens if num_new_tokens is None else num_computed + num_new_tokens
        num_new = self._num_blocks(sequence.num_tokens) - len(prefix.blocks)
        if self.full.num_left(prefix.blocks) - num_new < reserve:
            return False
        if self._has_windows:
            num_new = self._num_blocks(num_tokens) - len(prefix.blocks)
            if self.windowed.num_left(prefix.window_blocks) - num_new < reserve:
                return False
        if self.states and not self._take_state(sequence, prefix):
            return False
        self.full.hold(prefix.blocks)
        sequence.block_table.extend(prefix.blocks)
        sequence.num_computed_tokens = num_computed
        if self._has_windows:
            self.windowed.hold(prefix.window_blocks)
            sequence.window_table.extend(prefix.window_blocks)
            sequence.num_behind = len(prefix.blocks) - len(prefix.window_blocks)
        self.grow(sequence, num_tokens)
        self._copy_partial(sequence, prefix)
        return True

    def _copy_partial(self, sequence: Sequence, prefix: Prefix) -> None:
        index = len(prefix.blocks)
        num_tokens = prefix.num_tokens - index * self.block_size
        if prefix.partial is not None:
            self._copies.append(BlockCopy(prefix.partial, sequence.block_table[index], num_tokens))
        if prefix.window_partial is not None:
            target = sequence.window_table[index - sequence.num_behind]
            self._window_copies.append(BlockCopy(prefix.window_partial, target, num_tokens))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

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

    def take_window_copies(self) -> tuple[BlockCopy, ...]:
        """Return the same for blocks of windows."""
        copies, self._window_copies = tuple(self._window_copies), []
        return copies

    def hold_all(self, sequence: Sequence) -> bool:
        """Whether the sequence's block tables hold all its tokens."""
        num_tokens, size = len(sequence.token_ids), self.block_size
        if num_tokens > len(sequence.block_table) * size:
            return False
        return not self._has_windows or num_tokens <= (sequence.num_behind + len(sequence.window_table)) * size

    def grow(self, sequence: Sequence, num_tokens: int | None = None) -> bool:
        """Make the block table hold all tokens; False, and nothing changes, when there are too few blocks.

        The window table holds the first `num_tokens`, or all of them. Free blocks are taken first; then cached ones are
        evicted, the one that is unused for the longest time first.
        """
        num_new = self._num_blocks(sequence.num_tokens) - len(sequence.block_table)
        num_in_windows = self._num_blocks(sequence.num_tokens if num_tokens is None else num_tokens)
        num_in_windows -= sequence.num_behind + len(sequence.window_table)
        if num_new > self.full.num_left() or (self._has_windows and num_in_windows > self.windowed.num_left()):
            return False
        sequence.block_table.extend(self.full.take() for _ in range(num_new))
        if self._has_windows:
            sequence.window_table.extend(self.windowed.take() for _ in range(num_in_windows))
        return True

    def drop_behind(self, sequence: Sequence) -> None:
        """Take the blocks back that lie behind the windows of the sequence's next tokens.

        They are evicted first: a prefix that ends within a sequence is rarer than the next turn of another session.
        """
        if self._has_windows:
            count = self._first_kept(sequence.num_computed_tokens) - sequence.num_behind
            if count > 0:
                self.windowed.give_back(reversed(sequence.window_table[:count]), to_front=True)
                del sequence.window_table[:count]
                sequence.num_behind += count

    def register(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks findable that were filled by computing the tokens from `num_computed_before` on.

        Where another block holds the same prefix already, that one stays, unless it may be evicted before these.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(num_computed_before // size, sequence.num_computed_tokens // size):
            token_ids = packed(sequence.content(index * size, (index + 1) * size))
            branch = self._digest(sequence, index), token_ids[0]
            content = Content(self._digest(sequence, index + 1), branch, token_ids)
            self._add(sequence.block_table[index], content)
            if self._has_windows:
                self.windowed.add(sequence.window_table[index - sequence.num_behind], content)

    def _add(self, block: int, content: Content) -> None:
        """Make a block findable. Where a state is needed, only half full blocks are found by their first token.

        There another block with this prefix stays, because a state may be kept behind it.
        """
        by_branch = not self.states or len(content.token_ids) < self.block_size
        self.full.add(block, content, by_branch=by_branch, replaces=not self.states)

    def _keep_state(self, sequence: Sequence) -> None:
        """Keep the state behind the sequence's last computed token, and make its last block findable."""
        slot, num_tokens = sequence.state_slot, sequence.num_computed_tokens
        sequence.state_slot = PADDING_SLOT
        if self.enable_prefix_caching and num_tokens > 0:
            self.states.keep(slot, self._findable(sequence, num_tokens))
        else:
            self.states.give_back(slot)

    def _findable(self, sequence: Sequence, num_tokens: int) -> int:
        """The block by which so many computed tokens of the sequence are found: its own if they are not cached yet."""
        index = (num_tokens - 1) // self.block_size
        token_ids, parent = (
            packed(sequence.content(index * self.block_size, num_tokens)),
            self._digest(sequence, index),
        )
        content = Content(block_digest(parent, token_ids), (parent, token_ids[0]), token_ids)
        found = self.full.find(content.digest)
        if found is not None:
            return found
        block = sequence.block_table[index]
        self._add(block, content)
        return block

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; of those that stay cached, the later ones of the prefix are evicted first.

        Those of windows are of use only as far as the last one is there: the earlier ones are evicted first.
        """
        if sequence.state_slot != PADDING_SLOT:
            self._keep_state(sequence)
        self.full.give_back(reversed(sequence.block_table))
        self.windowed.give_back(sequence.window_table)
        del sequence.block_table[:], sequence.window_table[:]
        sequence.num_computed_tokens = sequence.num_behind = 0

    def discard(self, sequence: Sequence) -> None:
        """Take all blocks back, and make them unfindable: their content may be wrong (not finite, say)."""
        if sequence.state_slot != PADDING_SLOT:
            self.states.give_back(sequence.state_slot)
            sequence.state_slot = PADDING_SLOT
        for block in sequence.block_table:
            self.full.forget(block)
        if self.states:
            for found in self._beside(sequence):
                self.states.forget(found)
        if self._has_windows:
            for index in range(sequence.num_computed_tokens // self.block_size):
                in_windows = self.windowed.find(self._digest(sequence, index + 1))
                if in_windows is not None:
                    self.windowed.forget(in_windows)
        self.release(sequence)

    def _beside(self, sequence: Sequence) -> Iterator[int]:
        """Blocks of others by which the sequence's prefixes are found, whose states may be its own."""
        for index in range((sequence.num_tokens - 1) // self.block_size + 1):
            parent, first = self._digest(sequence, index), index * self.block_size
            found = self.full.find(parent), self.full.find_branch(parent, sequence.content(first, first + 1)[0])
            yield from (block for block in found if block is not None)

    def forget_all(self) -> None:
        """Make all blocks free and unfindable. Raises InvariantError while a sequence holds one."""
        self.full.forget_all()
        self.windowed.forget_all()
        self.states.forget_all()

    def check_integrity(self, sequences: Items[Sequence]) -> None:
        """Raise InvariantError unless the accounts agree with the block tables of `sequences`: all there are."""
        self.full.check_integrity([sequence.block_table for sequence in sequences])
        self.windowed.check_integrity([sequence.window_table for sequence in sequences])
        slots = [sequence.state_slot for sequence in sequences if sequence.state_slot != PADDING_SLOT]
        self.states.check_integrity([*slots, *self._saving], self.full.contents)

    def _digest(self, sequence: Sequence, num_blocks: int) -> bytes:
        """The digest of the sequence's first full blocks; of none, its root. Computed once each."""
        digests = sequence.block_digests
        if not digests:
            digests.append(root_digest(sequence.params.cache_salt, sequence.adapter))
        while len(digests) <= num_blocks:
            end = len(digests) * self.block_size
            digests.append(block_digest(digests[-1], sequence.content(end - self.block_size, end)))
        return digests[num_blocks]
