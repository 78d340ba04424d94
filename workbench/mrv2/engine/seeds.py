"""Seeds of sequences: explicit, or derived from the engine's seed, so that a run can be repeated.

The mixer is SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), a bijection of 64-bit integers: for one parent, all children differ.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """Return the SplitMix64 output for the state `value`; both are 64-bit unsigned."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return draw `index` of the generator that `seed` starts (64-bit unsigned); distinct for distinct indices."""
    return splitmix64((splitmix64(seed & _MASK) + index * _GAMMA) & _MASK)


def resolve_seed(seed: int | None, *, engine_seed: int, admission_index: int, sample_index: int) -> int:
    """Return the 64-bit unsigned seed of one sequence.

    Args:
        seed: the request's own seed, or None for one derived from the engine's.
        engine_seed: `EngineConfig.seed`.
        admission_index: how many requests the engine had accepted before this one.
        sample_index: which of the request's n sequences; sequence 0 keeps the request's seed.
    """
    base = seed & _MASK if seed is not None else derive_seed(engine_seed, admission_index)
    return base if sample_index == 0 else derive_seed(base, sample_index)
