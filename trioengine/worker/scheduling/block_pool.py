"""Blocks of the KV cache: which are free, cached or held, and which of them hold which prefix.

A block is *held* (in a sequence's block table; its reference count is above 0), *cached* (held by no sequence, its
content findable, evicted when needed) or *free*: `num_free + num_cached + num_held == num_blocks`, always.

The prefix cache is an index of computed blocks, held or not. A block is found by a digest of its tokens and of the
digest of the block before it, so that equal digests mean equal prefixes (the scheme of vLLM's automatic prefix
caching); or by its branch: the digest of the block before it, and its first token.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

from trioengine.core.errors import InvariantError
from trioengine.core.messages import NO_ADAPTER

ROOT_DIGEST = b""  # of requests without a cache salt
_SALTED = b"cache salt"  # keeps the roots apart from the digests of blocks
_WITH_IMAGES = b"images"  # the same for blocks whose ids take 8 bytes


class Content(NamedTuple):
    """The content of a findable block."""

    digest: bytes
    branch: tuple[bytes, int]  # the parent's digest and the first token
    token_ids: array[int]


class BlockPool:
    """Blocks that are alike: of the same layers."""

    def __init__(self, num_blocks: int, on_forget: Callable[[int], None] = lambda block: None) -> None:
        """`on_forget` is called with each findable block that becomes unfindable, but for `forget_all`."""
        self.num_blocks = num_blocks
        self._on_forget = on_forget
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is used again first
        self._cached: OrderedDict[int, None] = OrderedDict()  # a set: the block to be evicted first comes first
        self._contents: dict[int, Content] = {}  # of the findable blocks, cached or held
        self._by_digest: dict[bytes, int] = {}  # all of them
        self._by_branch: dict[tuple[bytes, int], int] = {}  # the latest of each branch

    @property
    def contents(self) -> Mapping[int, Content]:
        """The content of each findable block."""
        return self._contents

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

    def num_left(self, found: Iterable[int] = ()) -> int:
        """Blocks that a sequence can take beside the `found` ones."""
        return len(self._free) + len(self._cached) - len(self._cached.keys() & found)

    def find(self, digest: bytes) -> int | None:
        """The block with that digest."""
        return self._by_digest.get(digest)

    def find_branch(self, parent: bytes, first: int) -> int | None:
        """The latest block with that token behind that parent, of those that were added to be found so."""
        return self._by_branch.get((parent, first))

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1

    def take(self) -> int:
        """Hold a free block, or else the one that is cached and unused for the longest time. There must be one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._make_unfindable(block)
        self._ref_counts[block] = 1
        return block

    def give_back(self, blocks: Iterable[int], *, to_front: bool = False) -> None:
        """Hold these no longer; of the findable ones the first is evicted first.

        They are evicted after all that are cached, or `to_front`, the last one first: before these.
        """
        for block in blocks:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._contents:
                    self._cached[block] = None
                    self._cached.move_to_end(block, last=not to_front)
                else:
                    self._free.append(block)

    def add(self, block: int, content: Content, *, by_branch: bool = True, replaces: bool = True) -> bool:
        """Make a held block findable; False, and nothing changes, if it is, or another one with that digest.

        But it replaces the other one, if it may, where that is held by no sequence, and so might be evicted earlier.
        """
        other = self._by_digest.get(content.digest)
        if block in self._contents or (other is not None and not (replaces and other in self._cached)):
            return False
        if other is not None:
            self.forget(other)
        self._contents[block] = content
        self._by_digest[content.digest] = block
        if by_branch:
            self._by_branch[content.branch] = block
        return True

    def forget(self, block: int) -> None:
        """Make a block unfindable; nothing happens if it already is."""
        self._make_unfindable(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def forget_all(self) -> None:
        """Make all blocks free and unfindable. Raises InvariantError while a sequence holds one."""
        if self.num_held:
            raise InvariantError(f"{self.num_held} blocks are held, and are to be forgotten")
        self._free = list(range(self.num_blocks - 1, -1, -1))
        for index in (self._cached, self._contents, self._by_digest, self._by_branch):
            index.clear()

    def _make_unfindable(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is not None:
            self._on_forget(block)
            del self._by_digest[content.digest]
            if self._by_branch.get(content.branch) == block:
                del self._by_branch[content.branch]

    def check_integrity(self, tables: Items[Items[int]]) -> None:
        """Raise InvariantError unless the accounts agree with the block tables of all sequences.

        Takes some 0.4 s for a million blocks.
        """
        held = Counter(block for table in tables for block in table)
        for block, count in held.items():
            if self._ref_counts[block] != count:
                raise InvariantError(f"block {block} is counted {self._ref_counts[block]} times and held {count} times")
        if sum(self._ref_counts) != held.total():
            raise InvariantError(f"blocks are counted {sum(self._ref_counts)} times and held {held.total()} times")
        self._check_index()
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


def root_digest(cache_salt: str, adapter: int = NO_ADAPTER) -> bytes:
    """The parent of the first block of a request with this cache salt, and an adapter of this number."""
    if not cache_salt and adapter == NO_ADAPTER:
        return ROOT_DIGEST
    salt = adapter.to_bytes(8, "little")
    return blake2b(cache_salt.encode(), digest_size=32, person=_SALTED, salt=salt).digest()


def block_digest(parent: bytes, token_ids: Items[int]) -> bytes:
    """The digest of a full block after the prefix `parent`."""
    ids = packed(token_ids)
    kind = b"" if ids.typecode == "i" else _WITH_IMAGES
    return blake2b(parent + ids.tobytes(), digest_size=32, person=kind).digest()


def packed(token_ids: Items[int]) -> array[int]:
    """The ids in 4 bytes each; in 8, where there are an image's among them."""
    try:
        return array("i", token_ids)
    except OverflowError:
        return array("q", token_ids)
