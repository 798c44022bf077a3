# SPDX-License-Identifier: Apache-2.0
"""``apply_updates``: what is added, what stays, and by value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import Param, State, nn
from tether.errors import StructureError


@pytest.mark.parametrize(
    ("model", "updates", "new"),
    [
        ([1, 2.0], [-1, 0.5], [0, 2.5]),
        ({"a": 1, "b": object}, {"a": 2, "b": None}, {"a": 3, "b": object}),
        (((1, 2), [3]), (None, [4]), ((1, 2), [7])),
        ([None, 1], [None, 1], [None, 2]),
        (1, None, 1),
    ],
)
def test_plain_trees(model: Any, updates: Any, new: Any):
    assert tether.apply_updates(model, updates) == new


def test_a_step_of_a_module_that_is_threaded(key: jax.Array):
    norm = nn.BatchNorm(3)
    x = jax.random.normal(key, (4, 3))
    weights = jnp.arange(12.0).reshape(4, 3)
    grads = tether.grad(lambda norm: (norm(x) * weights).sum())(norm)
    new = tether.apply_updates(norm, jax.tree.map(lambda grad: -0.1 * grad, grads))
    np.testing.assert_allclose(new.bias, -0.1 * weights.sum(0), rtol=1e-6)
    assert norm.bias.tolist() == [0, 0, 0] and new.mean is norm.mean
    assert [type(cell) for cell in tether.variables(new).values()] == [Param, Param, State, State]


@pytest.mark.mixed_dtypes
def test_the_dtype_is_that_of_the_sum():
    assert tether.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2)).dtype == jnp.float32
    assert tether.apply_updates(jnp.ones(2, jnp.bfloat16), 1.0).dtype == jnp.bfloat16


def test_what_can_not_be_added():
    with pytest.raises(TypeError, match="unsupported operand"):
        tether.apply_updates([object()], [1])


def test_another_structure():
    with pytest.raises(StructureError) as caught:
        tether.apply_updates({"a": (1, 2)}, {"a": (1, 2, 3)})
    assert str(caught.value) == (
        "apply_updates: the updates are no prefix of the model.\n"
        "  at:       model['a']\n"
        "  got:      tuple of 2\n"
        "  expected: tuple of 3\n"
        "  fix:      give updates of the structure of the model, None where nothing changes"
    )
