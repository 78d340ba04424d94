"""Which blocks a request holds, in every KV cache group, and which prefix it can reuse."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mrv2.engine.block_pool import BlockPool, hash_block, hash_content
from mrv2.engine.request import Request


class KVCacheManager:
    """Allocates, frees and publishes blocks; G groups take one block id each per `block_size` tokens.

    A drafter's cache groups share the block ids of the target's, so that a block counts as filled by some
    of the loaded drafters (a bit each) or by none.  A prefix hit needs the bits of those in use.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        *,
        enable_prefix_caching: bool = True,
        num_drafters: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self.num_drafters = num_drafters
        self._extra_key = bytes(range(num_groups))
        self.fill()
        # blocks handed out since the last `take_fresh` (tests poison them)
        self._fresh: list[int] = []

    def fill(self, filling: int = 0, *, lookahead: int = 0, reads_ahead: bool = False) -> None:
        """Say which drafters' groups the steps to come fill, a bit each.

        Args:
            lookahead: tokens behind a step's last for whose drafts there must be blocks.
            reads_ahead: a position's content depends on the token behind it, too.
        """
        self.filling, self.lookahead, self.reads_ahead = filling, lookahead, reads_ahead
        self._readable = [bits for bits in range(1 << self.num_drafters) if bits & filling == filling]

    def tokens_wanted(self, request: Request, num_tokens: int) -> int:
        """Return the tokens that blocks must hold for a request to compute up to `num_tokens` and draft on."""
        return max(num_tokens, min(num_tokens + self.lookahead, request.max_len))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def find_prefix(self, request: Request) -> tuple[list[int], ...]:
        """Return, per group, the published blocks of the longest known prefix.

        At least one token is always left to compute: its logits are needed.
        """
        hits: tuple[list[int], ...] = tuple([] for _ in range(self.num_groups))
        if not self.enable_prefix_caching or not request.reads_prefix:
            return hits
        for content in self._hashes(request, (request.num_known - 1) // self.block_size):
            found = [self._lookup(content, g) for g in range(self.num_groups)]
            if any(block is None for block in found):
                break
            for group_hits, block in zip(hits, found, strict=True):
                assert block is not None, "checked above"
                group_hits.append(block)
        if self.reads_ahead and hits[0]:
            # the token behind the last block may not be the one that its last position has read
            for group_hits in hits:
                group_hits.pop()
        return hits

    def admit(self, request: Request, hits: tuple[list[int], ...], num_tokens: int) -> bool:
        """Give a request without blocks its prefix hits and blocks up to `num_tokens`; False if they do not fit.

        The whole of the known tokens must fit beside the running requests, not only the first
        chunk: a request that would be preempted half-way through its prompt only causes thrashing.
        """
        assert not any(request.block_ids), f"request {request.req_id} already holds blocks"
        num_hits = sum(map(len, hits))
        num_hits_free = sum(1 for group in hits for b in group if self.pool.ref_count[b] == 0)
        wanted = self.blocks_for(self.tokens_wanted(request, request.num_known))
        if wanted - num_hits > self.pool.num_free - num_hits_free:
            return False
        for group in hits:
            self.pool.touch(group)
        request.block_ids = tuple(list(group) for group in hits)
        request.num_published_blocks = len(hits[0])
        request.capacity = len(hits[0]) * self.block_size
        request.filled = self.filling
        grown = self.grow(request, num_tokens)
        assert grown is not None, "admission was checked against the free blocks"
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Extend a request's blocks to compute up to `num_tokens`; return the new ones, None if too few are free."""
        num_tokens = self.tokens_wanted(request, num_tokens)
        if num_tokens <= request.capacity:
            return tuple([] for _ in range(self.num_groups))
        missing = -(-(num_tokens - request.capacity) // self.block_size)
        if missing * self.num_groups > self.pool.num_free:
            return None
        added = tuple(self.pool.allocate(missing) for _ in range(self.num_groups))
        for mine, new in zip(request.block_ids, added, strict=True):
            mine.extend(new)
            self._fresh.extend(new)
        request.capacity += missing * self.block_size
        return added

    def add_block(self, requests: list[Request]) -> dict[str, tuple[list[int], ...]]:
        """Extend the blocks of each request by one in every group, and return them by id; the caller has counted."""
        added, num_groups = {}, self.num_groups
        blocks = self.pool.allocate(len(requests) * num_groups)
        self._fresh += blocks
        if num_groups == 1:
            # what the loop below does, at less than half of its cost: a step of many decodes comes here often
            for request, block in zip(requests, blocks, strict=True):
                request.block_ids[0].append(block)
                request.capacity += self.block_size
                added[request.message.req_id] = ([block],)
            return added
        for i, request in enumerate(requests):
            mine = blocks[i * num_groups : (i + 1) * num_groups]
            for group, block in zip(request.block_ids, mine, strict=True):
                group.append(block)
            request.capacity += self.block_size
            added[request.message.req_id] = tuple([block] for block in mine)
        return added

    def free(self, request: Request) -> None:
        """Release every block of a request, the tail first, so that shared prefixes live longest."""
        for group in request.block_ids:
            self.pool.release(reversed(group))
        request.block_ids = ()
        request.capacity = 0

    def publish(self, request: Request) -> None:
        """Make the full blocks findable whose tokens are known and whose steps have run."""
        if not self.enable_prefix_caching or not request.block_ids:
            return
        num_full = min(request.num_confirmed, request.num_known) // self.block_size
        if num_full <= request.num_published_blocks:
            return
        hashes = self._hashes(request, num_full)
        for i in range(request.num_published_blocks, num_full):
            for g, group in enumerate(request.block_ids):
                self.pool.publish(group[i], hashes[i], self._group_key(g, request.filled))
        request.num_published_blocks = num_full

    def publish_filled(
        self,
        requests: list[Request],
        # full blocks of each
        num_full: list[int],
        # [n, block_size] int32: the tokens of the last of these
        tokens: np.ndarray,
    ) -> list[int]:
        """Do for the last full block of each request what `publish` does, without a look at its own tokens.

        Returns the indices of requests for which `publish` has to: earlier blocks of theirs are not published either.
        """
        late, contents, size, pool, num_groups = [], tokens.tobytes(), 4 * self.block_size, self.pool, self.num_groups
        for i, (request, count) in enumerate(zip(requests, num_full, strict=True)):
            hashes, groups = request.block_hashes, request.block_ids
            if len(hashes) != count - 1 or request.num_published_blocks != count - 1 or not groups:
                late.append(i)
                continue
            content = hash_content(hashes[-1] if hashes else b"", contents[i * size : (i + 1) * size], self._extra_key)
            hashes.append(content)
            request.num_published_blocks = count
            for g, group in enumerate(groups):
                pool.publish(group[count - 1], content, request.filled * num_groups + g)
        return late

    def take_fresh(self) -> list[int]:
        """Return the blocks handed out since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def check(self, holders: Iterable[Request]) -> None:
        """Assert that the pool's books agree with what `holders` hold."""
        holders = list(holders)
        self.pool.check(block for r in holders for group in r.block_ids for block in group)
        for r in holders:
            assert r.capacity == len(r.block_ids[0]) * self.block_size, f"{r.req_id}: capacity {r.capacity}"
            assert r.num_computed <= r.capacity, f"{r.req_id}: {r.num_computed} tokens computed, room for {r.capacity}"
            assert len({len(group) for group in r.block_ids}) == 1, f"{r.req_id}: groups differ in length"

    def _group_key(self, group: int, filled: int) -> int:
        return filled * self.num_groups + group

    def _lookup(self, content: bytes, group: int) -> int | None:
        """Return a block of that content that every drafter in use has filled."""
        for bits in self._readable:
            block = self.pool.lookup(content, self._group_key(group, bits))
            if block is not None:
                return block
        return None

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the content hashes of the first `count` blocks, extending the request's list as needed."""
        hashes = request.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            tokens = request.token_ids[start : start + self.block_size]
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens, self._extra_key))
        return hashes[:count]
