# SPDX-License-Identifier: Apache-2.0
"""``if_array``: an axis for arrays, None for the rest."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tether


@pytest.mark.parametrize(
    ("leaf", "axis"), [(jnp.ones(2), 1), (np.ones(2), 1), (np.float32(1), 1), (1.0, None), (True, None), (len, None)]
)
def test_axis(leaf, axis):
    assert tether.if_array(1)(leaf) == axis


def test_it_is_a_value():
    assert tether.if_array(0) == tether.if_array(0) != tether.if_array(1)
    assert hash(tether.if_array(0)) == hash(tether.if_array(0))
    with pytest.raises(AttributeError):
        tether.if_array(0).axis = 1
