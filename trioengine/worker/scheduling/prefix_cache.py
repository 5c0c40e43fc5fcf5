"""The prefix cache: which blocks hold which prefixes, and in which order unused ones are evicted.

A full block is known by a digest of its tokens and of the digest of the block before it, so that equal digests mean
equal prefixes (the scheme of vLLM's automatic prefix caching). The first block's parent is the root of the request's
cache salt: requests with different salts find none of each other's blocks, neither whole nor in part.

The tokens of an image stand for its content: the cache is given `image_token_ids` in their places, which are no ids of
the vocabulary, so that different images never match.

Where prefixes part within a block, as after a chat template's first words, their common tokens are found by the parent
and the first token: of several blocks with these, the latest.
"""

from __future__ import annotations

from array import array
from collections.abc import KeysView
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple

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
