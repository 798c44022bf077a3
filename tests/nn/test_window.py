# SPDX-License-Identifier: Apache-2.0
"""How a window is spelled. What the layers make of it is in test_conv.py and test_pool.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether.errors import ArgumentError
from tether.nn._window import (
    explicit_padding,
    extent_of,
    first_best,
    join_leading,
    padding_per_axis,
    part_leading,
    per_axis,
    take_windows,
)


@pytest.mark.parametrize(("value", "wanted"), [(2, (2, 2)), ([1, 2], (1, 2)), (np.int64(3), (3, 3)), ((4, 1), (4, 1))])
def test_one_number_or_one_for_each_axis(value, wanted: tuple[int, int]):
    got = per_axis("Layer", "stride", value, 2)
    assert got == wanted
    assert all(type(number) is int for number in got)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, ((0, 0), (0, 0))),
        ((1, 2), ((1, 1), (2, 2))),
        (((1, 2), [3, 4]), ((1, 2), (3, 4))),
        ("same", "SAME"),
        ("Valid", "VALID"),
        ("same_lower", "SAME_LOWER"),
        ("causal", "CAUSAL"),
    ],
)
def test_padding_is_numbers_pairs_or_a_word(value, wanted):
    assert padding_per_axis("Layer", value, 2) == wanted


def test_one_pair_for_one_axis():
    assert padding_per_axis("Layer", ((1, 2),), 1) == ((1, 2),)
    with pytest.raises(ArgumentError) as caught:
        padding_per_axis("Layer", (1, 2), 1)
    assert str(caught.value) == (
        "Layer: padding has 2 numbers for 1 space axes.\n"
        "  got:      padding=(1, 2)\n"
        "  expected: an int, or 1 of them; a pair for each axis is ((before, after),)\n"
        "  fix:      padding=(0,)"
    )


@pytest.mark.parametrize(
    ("padding", "wanted"),
    [
        ("SAME", ((1, 1), (1, 2))),
        ("SAME_LOWER", ((1, 1), (2, 1))),
        ("VALID", ((0, 0), (0, 0))),
        ("CAUSAL", ((2, 0), (4, 0))),
        (((5, 0), (0, 7)), ((5, 0), (0, 7))),
    ],
)
def test_padding_in_numbers(padding, wanted):
    assert explicit_padding((7, 8), (3, 5), (1, 2), padding) == wanted


def test_extent_is_from_the_first_element_to_the_last():
    assert extent_of((3, 1, 4), (1, 5, 2)) == (3, 1, 7)


@pytest.mark.parametrize("places", [[[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 3], [3, 5]], [[5, 4], [3, 2], [1, 0]]])
def test_windows_take_the_place_of_their_axis(places: list):
    x, places = jnp.arange(36.0).reshape(2, 6, 3), np.asarray(places)
    windows = take_windows(x, 1, places)
    assert windows.shape == (2, 3, 2, 3)
    np.testing.assert_array_equal(windows, np.asarray(x)[:, places])


def test_first_of_equal_elements_has_the_gradient():
    x, places = jnp.asarray([1.0, 7.0, 7.0, 7.0, 0.0]), np.asarray([[0, 1, 2], [2, 3, 3], [4, 4, 4]])
    y, pull = jax.vjp(lambda x: first_best(x, 0, places, jnp.argmax), x)
    assert y.tolist() == [7.0, 7.0, 0.0]
    assert pull(jnp.asarray([2.0, 3.0, 5.0]))[0].tolist() == [0.0, 2.0, 3.0, 0.0, 5.0]


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0, 2), (1, 1, 1)])
def test_leading_axes_are_joined_and_parted(leading: tuple[int, ...]):
    x = jnp.arange(np.prod(leading, dtype=int) * 20.0).reshape((*leading, 4, 5))
    batch, kept = join_leading(x, 2)
    assert batch.ndim == 3
    np.testing.assert_array_equal(part_leading(batch, kept), x)
