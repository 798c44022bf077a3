# SPDX-License-Identifier: Apache-2.0
"""lerp against NumPy in float64; exact at both ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import SelectionError, StructureError


class Part(tether.Module):
    def __init__(self, seed: int, dtype: Any = jnp.float32):
        self.weight = tether.Param(jax.random.normal(jax.random.key(seed), (4,), dtype))
        self.mean = tether.State(jnp.full(2, float(seed)))
        self.count = tether.State(seed)
        self.rng = tether.Rng(seed)


@pytest.mark.parametrize("t", [0.0, 0.001, 0.3, 0.5, 0.9, 1.0, 1.5, jnp.asarray(0.25), np.float64(0.75)])
def test_between(t: Any):
    a, b = Part(1), Part(2)
    mixed = tether.lerp(a, b, t)
    x, y = np.asarray(a.weight, np.float64), np.asarray(b.weight, np.float64)
    np.testing.assert_allclose(mixed.weight, x + float(t) * (y - x), rtol=1e-6, atol=1e-7)
    assert mixed.mean.tolist() == [1, 1] and int(mixed.count) == 1 and (mixed.rng == jax.random.key(1)).all()


def test_exact_at_both_ends_and_where_equal():
    a, b = nn.LayerNorm(3), nn.LayerNorm(3)
    a.weight, b.weight = jnp.asarray([1e8, 0.1, 3.0]), jnp.asarray([1.0, 1e-9, 3.0])
    assert tether.lerp(a, b, 0.0).weight.tolist() == a.weight.tolist()
    assert tether.lerp(a, b, 1.0).weight.tolist() == b.weight.tolist()
    assert all(float(tether.lerp(a, b, t).weight[2]) == 3 for t in (0.1, 0.3, 0.7))


def test_selected_cells_and_dtypes():
    a, b = Part(1, jnp.bfloat16), Part(3, jnp.bfloat16)
    mixed = tether.lerp(a, b, 0.5, tether.Variable)
    assert mixed.weight.dtype == jnp.bfloat16 and mixed.mean.tolist() == [2, 2]
    assert int(mixed.count) == 1
    assert tether.lerp(a, b, 0.5, "mean").weight.tolist() == a.weight.tolist()


def test_is_a_copy_and_a_step_of_an_average():
    ema, model = Part(1), Part(2)
    start = np.asarray(ema.weight, np.float64)
    target = np.asarray(model.weight, np.float64)
    for _ in range(3):
        tether.update(ema, tether.lerp(ema, model, 0.1))
    np.testing.assert_allclose(ema.weight, target + 0.9**3 * (start - target), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.weight, Part(2).weight)


def test_inside_grad_and_jit():
    a, b = nn.LayerNorm(2), nn.LayerNorm(2)
    b.weight = jnp.full(2, 3.0)
    assert float(tether.grad(lambda t: tether.lerp(a, b, t).weight.sum())(0.25)) == pytest.approx(4)
    assert tether.jit(lambda t: tether.lerp(a, b, t).weight)(0.5).tolist() == [2, 2]


def test_what_differs_is_refused():
    for other in (nn.BatchNorm(2), nn.LayerNorm(3), nn.LayerNorm(1)):
        with pytest.raises(StructureError, match="lerp:"):
            tether.lerp(nn.LayerNorm(2), other, 0.5)
    with pytest.raises(SelectionError):
        tether.lerp(nn.LayerNorm(2), nn.LayerNorm(2), 0.5, "nothing")
