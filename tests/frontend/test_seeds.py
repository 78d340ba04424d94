"""Seeds: known values of the mixer, determinism, no two alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mrv2.engine.seeds import derive_seed, resolve_seed, splitmix64

any_seed = st.integers(-(2**63), 2**63 - 1)


def test_splitmix64_gives_the_published_first_outputs() -> None:
    """The generator seeded with 1234567 yields these (its state grows by the golden gamma a draw)."""
    gamma, expected = 0x9E3779B97F4A7C15, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64((1234567 + i * gamma) & (2**64 - 1)) for i in range(3)] == expected


@given(any_seed)
def test_sample_0_of_a_seeded_request_keeps_the_seed(seed: int) -> None:
    for admission_index in (0, 7):
        got = resolve_seed(seed, engine_seed=1, admission_index=admission_index, sample_index=0)
        assert got == seed % 2**64


@given(any_seed, st.sets(st.integers(0, 2**40), min_size=2, max_size=50))
def test_children_of_one_seed_differ(seed: int, indices: set[int]) -> None:
    assert len({derive_seed(seed, i) for i in indices}) == len(indices)


@given(any_seed)
def test_a_grid_of_requests_and_samples_has_no_two_alike(engine_seed: int) -> None:
    def grid() -> list[int]:
        return [
            resolve_seed(None, engine_seed=engine_seed, admission_index=r, sample_index=i)
            for r in range(40)
            for i in range(5)
        ]

    seeds = grid()
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert grid() == seeds


def test_neighbouring_engine_seeds_share_nothing() -> None:
    grids = [
        {resolve_seed(None, engine_seed=e, admission_index=r, sample_index=0) for r in range(200)} for e in range(5)
    ]
    assert len(set().union(*grids)) == 1000
