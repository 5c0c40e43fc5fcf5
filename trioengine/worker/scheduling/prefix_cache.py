"""The prefix cache: which blocks hold which prefixes, and in which order unused ones are evicted.

A full block is known by a digest of its tokens and of the digest of the block before it, so that equal digests mean
equal prefixes (the scheme of vLLM's automatic prefix caching). The first block's parent is ROOT_DIGEST; a cache salt
or the content of an image is another root or more bytes, and nothing else here changes.
"""

from __future__ import annotations

from array import array
from collections.abc import KeysView
from collections.abc import Sequence as Items
from hashlib import blake2b

ROOT_DIGEST = b""


def block_digest(parent: bytes, token_ids: Items[int]) -> bytes:
    """The digest of a full block after the prefix `parent`."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=32).digest()


class PrefixCache:
    """Registered blocks by digest, and the unused ones among them in the order of eviction, oldest first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
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

    def register(self, block: int, digest: bytes) -> None:
        """Make a computed block findable; where another block holds the same prefix already, that one stays."""
        if digest not in self._blocks and block not in self._digests:
            self._blocks[digest] = block
            self._digests[block] = digest

    def is_registered(self, block: int) -> bool:
        return block in self._digests

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
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]

    def find_disagreement(self) -> str | None:
        """What does not agree among the maps, or None."""
        found = list(map(self._blocks.get, self._digests.values()))
        if found != list(self._digests) or len(self._blocks) != len(self._digests):
            return "the prefix cache's two maps are not each other's inverse"
        if not self._unused.keys() <= self._digests.keys():
            return "the prefix cache keeps blocks that hold no prefix"
        return None
