"""Blocks: counted once, found by content, evicted oldest first."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.engine.block_pool import NULL_BLOCK, BlockPool, hash_block


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0 and NULL_BLOCK not in pool.hash_of


def test_a_pool_needs_a_usable_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_hash_covers_tokens_parent_and_extra_keys() -> None:
    base = hash_block(b"", [1, 2, 3])
    assert base == hash_block(b"", [1, 2, 3])
    others = [hash_block(b"", [1, 2, 4]), hash_block(base, [1, 2, 3]), hash_block(b"", [1, 2, 3], b"adapter")]
    assert len({base, *others}) == 4


def test_equal_blocks_keep_the_first_and_survive_the_end_of_the_second() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    content = hash_block(b"", range(16))
    pool.publish(first, content, 0)
    pool.publish(second, content, 0)
    assert pool.lookup(content, 0) == first
    pool.release([second])
    pool.check([first])
    assert pool.lookup(content, 0) == first


def test_cached_blocks_are_handed_out_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    for block in (a, b):
        pool.publish(block, hash_block(b"", [block]), 0)
    pool.release([a])
    pool.release([b, c, d])
    assert set(pool.allocate(2)) == {c, d}
    assert pool.allocate(2) == [a, b]
    assert not pool.cached and not pool.hash_of


def test_a_hit_on_a_free_block_takes_it_out_of_the_free_list() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x", 0)
    pool.release([block])
    pool.touch([block])
    pool.check([block])
    assert pool.num_free == 1 and pool.num_cached_free == 0


def test_groups_are_kept_apart() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x", 1)
    assert pool.lookup(b"x", 0) is None and pool.lookup(b"x", 1) == block


def test_the_books_balance_under_random_use() -> None:
    rng = np.random.default_rng(0)
    pool = BlockPool(20)
    held: list[list[int]] = []
    for _ in range(2000):
        action = rng.integers(4)
        if action == 0 and pool.num_free >= 3:
            held.append(pool.allocate(int(rng.integers(1, 4))))
        elif action == 1 and held:
            pool.release(reversed(held.pop(int(rng.integers(len(held))))))
        elif action == 2 and held:
            block = held[int(rng.integers(len(held)))][0]
            pool.publish(block, hash_block(b"", [int(rng.integers(30))]), 0)
        elif action == 3 and pool.cached:
            block = list(pool.cached.values())[int(rng.integers(len(pool.cached)))]
            pool.touch([block])
            held.append([block])
        pool.check(b for blocks in held for b in blocks)
