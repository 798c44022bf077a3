# SPDX-License-Identifier: Apache-2.0
"""Filters on Equinox's modules; what they do to other trees is tested where they live."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx


class Layer(eqx.Module):
    weight: Any
    bias: Any
    name: str = eqx.static_field(default="layer")


def layer() -> Layer:
    return Layer(jnp.ones(2), 3)


def test_predicates():
    leaves = [jnp.ones(1), np.ones(1), np.float32(1), 1.0, 1, "a", layer()]
    assert [eqx.is_array(x) for x in leaves] == [True, True, True, False, False, False, False]
    assert [eqx.is_array_like(x) for x in leaves] == [True] * 5 + [False] * 2
    assert [eqx.is_inexact_array(x) for x in leaves] == [True, True, True, False, False, False, False]
    assert [eqx.is_inexact_array_like(x) for x in leaves] == [True, True, True, True, False, False, False]
    assert not eqx.is_inexact_array(np.ones(1, int)) and eqx.is_inexact_array(np.ones(1, jnp.bfloat16))


def test_a_module_is_filtered_by_field():
    module = layer()
    kept = eqx.filter(module, eqx.is_array)
    assert kept.weight is module.weight and kept.bias is None and kept.name == "layer"
    rest = eqx.filter(module, eqx.is_array, inverse=True, replace="gone")
    assert rest.weight == "gone" and rest.bias == 3


def test_a_module_of_masks_is_a_spec():
    module = [layer(), layer()]
    spec = eqx.tree_at(lambda tree: tree[1].weight, jax.tree.map(lambda _: False, module), replace=True)
    kept, rest = eqx.partition(module, spec)
    assert [x is None for x in (kept[0].weight, kept[0].bias, kept[1].weight, kept[1].bias)] == [
        True,
        True,
        False,
        True,
    ]
    assert rest[1].weight is None and rest[1].bias == 3
    assert eqx.combine(kept, rest)[1].weight is module[1].weight


def test_is_leaf_asks_about_modules():
    is_layer = lambda node: isinstance(node, Layer)
    out = eqx.filter([layer(), 1], lambda node: not is_layer(node), is_leaf=is_layer)
    assert out == [None, 1]


@pytest.mark.parametrize("spec", [1, [True], (True, 2), None])
def test_a_bad_spec_is_a_value_error(spec: Any):
    with pytest.raises(ValueError, match="filter_spec|a leaf of"):
        eqx.filter((1, 2), spec)
