"""Draws are named, not made in turn: statistics with fixed seeds, so that a failure is a change of the code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus.core.randomness import hash_words, mix64, uniforms

examples = settings(max_examples=60, derandomize=True, deadline=None)
INTS = st.integers(0, 2**40)


def grid(seed: int, num_positions: int, num_samples: int, num_tokens: int) -> NDArray[np.float64]:
    """[position, sample, token]."""
    position, sample, token = np.ix_(range(num_positions), range(num_samples), range(num_tokens))
    return uniforms(seed, position, sample, token)


def test_mix64_gives_the_published_sequence_of_splitmix64():
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * golden) % 2**64 for i in range(5)], dtype=np.uint64)
    assert mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@examples
@given(INTS, st.lists(st.tuples(INTS, INTS, INTS), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_draw_is_the_same_alone_in_any_batch_and_in_any_order(seed, names, random):
    alone = {name: float(uniforms(seed, *name)) for name in names}
    random.shuffle(names)
    assert uniforms(seed, *np.array(names).T).tolist() == [alone[name] for name in names]


def test_draws_of_a_grid_all_differ_also_where_arguments_change_places():
    draws = np.stack([grid(seed, 24, 24, 24) for seed in range(24)])
    assert len(np.unique(draws)) == draws.size
    assert draws.min() >= 0 and draws.max() < 1


@examples
@given(st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4), st.integers(0, 3), st.integers(1, 2**40))
def test_each_argument_changes_the_draw(words, place, by):
    other = [word + by * (i == place) for i, word in enumerate(words)]
    assert uniforms(*words) != uniforms(*other)


def test_the_number_of_words_matters():
    seen = [int(hash_words(*words)) for words in ((), (0,), (0, 0), (0, 0, 0))]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40, -(2**63), 2**63 - 1])
def test_draws_are_uniform(seed: int):
    draws = grid(seed, 40, 8, 200).ravel()
    for bins in (2, 64, 1000):
        counts = np.bincount((draws * bins).astype(int), minlength=bins)
        chi_square = ((counts - draws.size / bins) ** 2 / (draws.size / bins)).sum()
        assert abs(chi_square - (bins - 1)) < 5 * np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("argument", ["seed", "position", "sample", "token"])
@pytest.mark.parametrize("distance", [1, 2, 3, 8])
def test_neighbours_in_an_argument_are_not_correlated(argument: str, distance: int):
    draws = np.stack([grid(seed, 16, 16, 16) for seed in range(16)])
    axis = ["seed", "position", "sample", "token"].index(argument)
    first, second = (np.take(draws, range(d, 16 - distance + d), axis).ravel() for d in (0, distance))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size)


def test_one_bit_of_any_argument_flips_half_of_the_bits():
    words = np.random.default_rng(0).integers(0, 2**40, size=(4, 500))
    base = hash_words(*words)
    for place in range(4):
        for bit in range(40):
            other = words.copy()
            other[place] ^= 1 << bit
            flipped = np.unpackbits((base ^ hash_words(*other)).view(np.uint8))
            assert flipped.sum() / 500 == pytest.approx(32, abs=5 * 4 / np.sqrt(500))
