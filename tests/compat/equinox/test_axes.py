# SPDX-License-Identifier: Apache-2.0
"""Specifications of axes."""

from __future__ import annotations

import jax.numpy as jnp

from tether.compat.equinox._axes import first_of_arrays, mapped_axes, resolved, traced_spec
from tether.tree import is_array


def test_functions_are_asked_about_each_leaf_and_the_rest_is_a_prefix():
    tree = ({"a": jnp.ones(2), "b": "text"}, [1, 2], 3, 4)
    axes = resolved("f", tree, (first_of_arrays, None, True, -1))
    assert axes == ({"a": 0, "b": None}, None, True, -1)
    assert mapped_axes(axes) == ({"a": 0, "b": None}, None, None, -1)
    assert traced_spec(axes) == ({"a": True, "b": is_array}, is_array, True, True)
