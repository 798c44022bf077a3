# SPDX-License-Identifier: Apache-2.0
"""Initializers: that the fans are those of ``[out, in, *space]``, by the statistics of the draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether import nn
from tether.nn import init

# [out, in, *space]: fan_in = in * space, fan_out = out * space
SHAPES = [((400, 100), 100, 400), ((100, 400), 400, 100), ((64, 16, 3, 3), 144, 576)]
VARIANCES = {
    "he_normal": lambda fan_in, fan_out: 2 / fan_in,
    "he_uniform": lambda fan_in, fan_out: 2 / fan_in,
    "lecun_normal": lambda fan_in, fan_out: 1 / fan_in,
    "lecun_uniform": lambda fan_in, fan_out: 1 / fan_in,
    "glorot_normal": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "glorot_uniform": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
}


@pytest.mark.parametrize("name", VARIANCES)
@pytest.mark.parametrize(("shape", "fan_in", "fan_out"), SHAPES, ids=str)
def test_variance_is_that_of_the_fan(name: str, shape: tuple, fan_in: int, fan_out: int, key: jax.Array):
    values = getattr(init, name)()(key, shape, jnp.float32)
    assert float(values.std()) == pytest.approx(VARIANCES[name](fan_in, fan_out) ** 0.5, rel=0.05)
    assert float(values.mean()) == pytest.approx(0, abs=0.02)


def test_variance_scaling_reads_our_layout(key: jax.Array):
    values = init.variance_scaling(3.0, "fan_out", "normal")(key, (400, 100), jnp.float32)
    assert float(values.std()) == pytest.approx((3 / 400) ** 0.5, rel=0.05)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 2, 3, 3)], ids=str)
def test_orthogonal_rows_or_columns(shape: tuple, key: jax.Array):
    matrix = np.asarray(init.orthogonal()(key, shape, jnp.float32), np.float64).reshape(shape[0], -1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)


def test_the_rest_is_jax():
    for name in ("constant", "normal", "ones", "truncated_normal", "uniform", "zeros"):
        assert getattr(init, name) is getattr(jax.nn.initializers, name)
    assert sorted(init.__all__, key=str.lower) == init.__all__ or set(init.__all__) <= set(vars(init))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64], ids=lambda dtype: dtype.__name__)
def test_symmetric_uniform(dtype, key: jax.Array):
    values = init.symmetric_uniform(0.5)(key, (2000,), dtype)
    assert values.dtype == dtype
    for part in {"real": values.real, "imag": values.imag}.values() if dtype == jnp.complex64 else [values]:
        part = np.asarray(part, np.float64)
        assert -0.5 <= part.min() < -0.48
        assert 0.48 < part.max() <= 0.5
        assert part.mean() == pytest.approx(0, abs=0.03)


def test_layers_take_them(key: jax.Array):
    conv = nn.Conv2d(16, 64, 3, key=key, weight_init=init.he_normal(), bias_init=init.zeros)
    assert float(conv.weight.std()) == pytest.approx((2 / 144) ** 0.5, rel=0.05)
    assert not conv.bias.any()
    linear = nn.Linear(3, 2, key=key, dtype=jnp.complex64)
    assert linear.weight.dtype == jnp.complex64
    assert float(jnp.abs(linear.weight.imag).max()) > 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_orthogonal_in_half_precision(key: jax.Array, dtype):
    weight = nn.init.orthogonal(2.0)(key, (3, 5), dtype)
    assert weight.dtype == dtype
    wide = np.asarray(weight, np.float64)
    np.testing.assert_allclose(wide @ wide.T, 4 * np.eye(3), atol=0.05)
