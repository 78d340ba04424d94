"""Physical KV blocks: who holds them, which are free, and which can be found by their content."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0  # never allocated; padding rows of block tables point at it


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the content hash of a full block: its tokens, everything before it, and extra keys.

    `extra` carries whatever else decides the block's content: adapter, multimodal content, cache
    salt, and the set of KV cache groups that were filled.  16 bytes of BLAKE2b.
    """
    return hash_content(parent, array("i", token_ids).tobytes(), extra)


def hash_content(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """Do what `hash_block` does for `tokens` that are int32 already."""
    return hashlib.blake2b(parent + tokens + extra, digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with an LRU list of free ones; a free block keeps its content until it is reused.

    Every block but the null block is in exactly one place: held (reference count > 0) or free.
    Free blocks with a hash are the cached ones; they are handed out last, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: the pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        # block id -> (content hash, KV cache group) once published
        self.hash_of: dict[int, tuple[bytes, int]] = {}
        self.cached: dict[tuple[bytes, int], int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        return sum(1 for block in self.hash_of if self.ref_count[block] == 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, forgetting the content of those that were cached."""
        free, hash_of, ref_count = self._free, self.hash_of, self.ref_count
        assert count <= len(free), f"asked for {count} blocks, only {len(free)} are free"
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            ref_count[block] = 1
            if block in hash_of:
                del self.cached[hash_of.pop(block)]
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of `blocks` (a prefix hit)."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self._free[block]
            self.ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference on each block, in the given order (first = evicted first)."""
        for block in blocks:
            self.ref_count[block] -= 1
            assert self.ref_count[block] >= 0, f"block {block} was released more often than it was taken"
            if self.ref_count[block] == 0:
                self._free[block] = None
                if block not in self.hash_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, content: bytes, group: int) -> None:
        """Make a held block findable by its content; an equal block that is already known stays the one found."""
        key = (content, group)
        if key not in self.cached and block not in self.hash_of:
            self.cached[key] = block
            self.hash_of[block] = key

    def lookup(self, content: bytes, group: int) -> int | None:
        return self.cached.get((content, group))

    def forget_all(self) -> None:
        """Drop every published hash; held blocks stay held."""
        self.cached.clear()
        self.hash_of.clear()

    def check(self, held: Iterable[int]) -> None:
        """Assert free + held = all, none twice, and that hashes map both ways; `held` lists every reference."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        assert counts == self.ref_count, "reference counts differ from the blocks that requests hold"
        assert counts[NULL_BLOCK] == 0, "a request holds the null block"
        for block in range(1, self.num_blocks):
            assert (block in self._free) == (counts[block] == 0), f"block {block} is both free and held, or neither"
        assert len(self._free) + sum(c > 0 for c in counts) == self.num_usable, "free + used != total"
        assert len(self.cached) == len(self.hash_of), "the two hash maps differ in size"
        assert all(self.hash_of[b] == key for key, b in self.cached.items()), "the two hash maps disagree"
