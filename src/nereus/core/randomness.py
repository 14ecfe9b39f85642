"""Random numbers as a function of what they are for, never of who draws them.

A draw is named by (seed, position, sample, token); splitmix64 (Steele, Lea, Flood 2014) mixes the four words one after
the other. Any plan, batch or order of evaluation draws the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64, elementwise."""
    with np.errstate(over="ignore"):
        z = words + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hash_words(*words: ArrayLike) -> NDArray[np.uint64]:
    """One 64-bit word from several integers, broadcast against each other."""
    state = np.zeros((), dtype=np.uint64)
    for word in words:
        state = mix64(state ^ np.asarray(word, dtype=np.int64).astype(np.uint64))
    return state


def uniforms(seed: int, positions: ArrayLike, samples: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for every (position, sample, token)."""
    bits = hash_words(seed, positions, samples, tokens) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
