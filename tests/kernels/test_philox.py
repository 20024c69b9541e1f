"""The Philox random number generator, compared with the test vectors of its authors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.worker.philox import philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_matches_published_vectors(counter: str, key: str, expected: str) -> None:
    def array(text: str) -> np.ndarray:
        return np.array([[int(word, 16) for word in text.split()]], np.uint32)

    assert (philox(array(key), array(counter)) == array(expected)).all()


@given(
    draws=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 127)), min_size=1, max_size=20
    )
)
def test_draw_depends_only_on_seed_position_and_sequence(draws: list[tuple[int, int, int]]) -> None:
    def numbers(chosen: list[tuple[int, int, int]]) -> list[float]:
        seeds, positions, sequences = zip(*chosen, strict=True)
        return uniform(
            np.array(seeds, np.uint64), np.array(positions, np.uint32), np.array(sequences, np.uint32)
        ).tolist()

    together = numbers(draws)
    assert together == [numbers([draw])[0] for draw in draws]
    assert all(0 <= number < 1 for number in together)


def test_draws_are_uniform() -> None:
    numbers = uniform(np.full(20_000, 7, np.uint64), np.arange(20_000, dtype=np.uint32), np.zeros(20_000, np.uint32))
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-squared with 19 degrees of freedom: 99.9 % are below
