# SPDX-License-Identifier: Apache-2.0
"""The cases that are about BatchNorm alone, with their right values to the digit, in every dtype.

The numbers are those of the list of cases that the project keeps: the oracles O1, O3 and O4 among them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import tether
from tests.cases.common import O1, O1_OUT, is_plain
from tether import nn
from tether.errors import ArgumentError, ShapeError

# How far an output or a gradient of that dtype may be off.
DTYPES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-6}
O3 = [
    (np.array([1, 1, 1, 0, 1, 0, 0, 1], bool), 2.8, 6.16),
    (np.array([1, 1, 1, 0, 0, 0, 0, 1], bool), 2.5, 7.25),  # the third of four shards has nothing
]
O4_OUT = np.array([-1.34164, -0.44721, 0.44721, 1.34164])


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def layer(size: int, dtype: jnp.dtype, **options) -> nn.BatchNorm:
    return nn.BatchNorm(size, dtype=dtype, **options)


def close(actual, desired, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), desired, rtol=tolerance, atol=tolerance)


class TestCase06AcrossDevices:
    @pytest.mark.parametrize(("mask", "mean", "var"), O3, ids=["ragged", "one shard without a value"])
    def test_o3_forward_and_gradient(self, dtype: jnp.dtype, mask: np.ndarray, mean: float, var: float):
        rows, c = np.arange(8.0), np.where(mask, [1.0, -1, 2, 0, 3, 0, 0, -2], 0)
        norm = layer(1, dtype, sync="d", decay=0)

        def loss(x, mask, c):
            y = norm(x, mask=mask)
            return jax.lax.psum((c * y.astype(c.dtype)).sum(), "d"), y

        mesh = Mesh(np.array(jax.devices()), "d")
        call = tether.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=(P(), P("d")))
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        x, valid, weights = jnp.asarray(rows[:, None], dtype), mask[:, None], jnp.asarray(c[:, None], wide)
        gradient, y = tether.jit(tether.grad(call, has_aux=True))(x, valid, weights)
        close([norm.mean[0], norm.var[0]], [mean, var])
        z, scale = (rows - mean) / np.sqrt(var + 1e-5), 1 / np.sqrt(var + 1e-5)
        close(y[:, 0], z, DTYPES[dtype.name])
        n = mask.sum()
        right = np.where(mask, scale * (c - c.sum() / n - z * (c * z).sum() / n), 0)
        close(gradient[:, 0], right, DTYPES[dtype.name])

    def test_statistics_of_all_replicas_are_one(self):
        norm = nn.BatchNorm(1, sync="d")
        mesh = Mesh(np.array(jax.devices()), "d")
        step = tether.jit(tether.shard_map(norm, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        for _ in range(10):
            step(np.arange(8, dtype=np.float32)[:, None] ** 2)  # skewed: the means of the shards are 0.5 to 42.5
        close(norm.mean, [(1 - 0.9**10) * 17.5], 1e-5)
        close(norm.var, [0.9**10 + (1 - 0.9**10) * 278.25], 1e-5)
        assert len({float(shard.data[0]) for shard in norm.mean.addressable_shards}) == 1


class TestCase08Evaluation:
    def test_before_any_training_it_is_the_identity(self, dtype: jnp.dtype):
        x = jnp.asarray(O1, dtype)
        for options in ({}, {"debias": True}, {"mode": "ema"}, {"debias": "equinox"}):
            y = layer(2, dtype, eps=0.0, **options)(x, training=False)
            np.testing.assert_array_equal(np.asarray(y, np.float64), O1)
            close(layer(2, dtype, **options)(x, training=False), O1 / np.sqrt(1 + 1e-5), DTYPES[dtype.name])

    @pytest.mark.parametrize("steps", [1, 10, 100])
    def test_variance_after_steps_on_one_batch(self, dtype: jnp.dtype, steps: int):
        x, v = jnp.asarray(O1, dtype), np.array([5.0, 125.0])
        plain, debiased = layer(2, dtype, decay=0.99), layer(2, dtype, decay=0.99, debias=True)
        once, twice = tether.jit(plain), tether.jit(debiased)
        for _ in range(steps):
            once(x), twice(x)
        close(plain.var, 0.99**steps + (1 - 0.99**steps) * v, 3e-6)
        close([debiased.mean, debiased.var], [[4, 25], v])
        if steps == 1:
            np.testing.assert_array_equal([debiased.mean, debiased.var], [[4, 25], v])
        out = np.asarray(debiased(x, training=False), np.float64)
        close(out.var(0), [1, 1], DTYPES[dtype.name] * 2 + 2e-6)


class TestCase13Variance:
    def test_o1(self, dtype: jnp.dtype):
        for variance, var in (("biased", [1.4, 13.4]), ("unbiased", [1.5666667, 17.5666667])):
            norm = layer(2, dtype, variance=variance)
            y = tether.jit(norm)(jnp.asarray(O1, dtype))
            assert y.dtype == dtype
            close(y[:, 0], O1_OUT, DTYPES[dtype.name])
            close(norm.mean, [0.4, 2.5])
            close(norm.var, var)

    def test_o4(self, dtype: jnp.dtype):
        # From 4096 on, the next number is 4 away in float16 and 32 in bfloat16.
        apart = {"float16": 4, "bfloat16": 32}.get(dtype.name, 1)
        norm = layer(1, dtype, decay=0)
        y = norm(jnp.asarray(4096 + apart * np.arange(4)[:, None], dtype))
        close(y[:, 0], O4_OUT, max(DTYPES[dtype.name], 1e-5))
        close([norm.mean[0], norm.var[0]], [4096 + 1.5 * apart, 1.25 * apart**2])

    def test_noise_on_a_large_offset(self):
        x = (1e4 + 0.01 * np.random.default_rng(0).normal(size=(1000, 1))).astype(np.float32)
        wide = x.astype(np.float64)
        norm = nn.BatchNorm(1, decay=0)
        y = norm(x)
        close(y, (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5), 1e-5)
        close(norm.var / wide.var(), 1.0, 1e-6)
        close(np.std(y), 0.954, 1e-2)

    @pytest.mark.parametrize("split", [False, True], ids=["one device", "four"])
    def test_constant_channel_is_zero_exactly(self, dtype: jnp.dtype, split: bool):
        value = 6e4 if dtype == jnp.float16 else 1e7
        norm = layer(1, dtype, decay=0, sync="d" if split else None)
        mesh = Mesh(np.array(jax.devices()), "d")
        call = tether.shard_map(norm, mesh=mesh, in_specs=P("d"), out_specs=P("d")) if split else norm
        x = jnp.full((12, 1), value, dtype)
        np.testing.assert_array_equal(tether.jit(call)(x), np.zeros((12, 1)))
        np.testing.assert_array_equal(norm.mean, np.asarray(x[0], norm.mean.dtype))
        np.testing.assert_array_equal(norm.var, [0])

    def test_squares_that_overflow_float16(self):
        x = (60000 + 32 * np.arange(4)).astype(np.float16)[:, None]  # neighbors there
        norm = nn.BatchNorm(1, decay=0)
        close(norm(x)[:, 0], O4_OUT, DTYPES["float16"])
        close([norm.mean[0], norm.var[0]], [60048, 1280])


class TestCase23HalfPrecision:
    @pytest.mark.parametrize("parameters", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("inputs", ["float16", "bfloat16"])
    def test_statistics_in_float32_and_the_dtype_of_the_input(self, parameters: str, inputs: str):
        norm = nn.BatchNorm(2, dtype=parameters)
        step = tether.jit(norm)
        x = jnp.asarray(O1 * 256, inputs)
        for _ in range(3):
            assert step(x).dtype == inputs
        assert norm.mean.dtype == norm.var.dtype == jnp.float32 and norm.weight.dtype == parameters
        close(norm.mean, (1 - 0.9**3) * 256 * np.array([4.0, 25]))
        close(norm.var, 0.9**3 + (1 - 0.9**3) * 256**2 * np.array([5.0, 125]))
        assert float(norm.var[1]) > 65504 and step.traces == 1
        right = (O1 * 256 - np.asarray(norm.mean)) / np.sqrt(np.asarray(norm.var) + 1e-5)
        close(norm(x, training=False), right, 2 * DTYPES[inputs])

    def test_a_scan_over_layers_keeps_its_carry(self, dtype: jnp.dtype):
        layers = tether.stack([layer(2, dtype), layer(2, dtype)])
        y, _ = tether.scan(lambda h, norm: (norm(h), None), jnp.asarray(O1, dtype), layers)
        assert y.dtype == dtype
        close(y[:, 0], O1_OUT, 2 * DTYPES[dtype.name] + 1e-5)
        close(layers.mean[0], [0.4, 2.5])

    def test_integers_give_the_dtype_of_the_parameters(self, dtype: jnp.dtype):
        for options in ({}, {"affine": False}):
            norm = layer(2, dtype, **options)
            y = norm(O1.astype(np.int32))
            assert y.dtype == (norm.mean.dtype if norm.weight is None else dtype)
            close(y[:, 0], O1_OUT, DTYPES[dtype.name])
        assert nn.BatchNorm(2)(O1.astype(np.int32)).dtype == jnp.float32

    def test_float64_through_a_layer_of_float32(self):
        with jax.enable_x64(True):
            norm = nn.BatchNorm(2)
            y = tether.jit(norm)(jnp.asarray(O1, jnp.float64) + 1e6)
            assert y.dtype == jnp.float64 and norm.mean.dtype == jnp.float32
            close(y[:, 0], (O1[:, 0] - 4) / np.sqrt(5 + 1e-5), 1e-12)


class TestCase57BatchOfOne:
    @pytest.mark.parametrize("options", [{}, {"mode": "ema"}, {"variance": "unbiased"}, {"debias": True}], ids=str)
    def test_an_error_and_nothing_moves(self, dtype: jnp.dtype, options: dict):
        norm, x = layer(2, dtype, **options), jnp.asarray(O1[:1], dtype)
        for f in (norm, tether.jit(norm), tether.grad(lambda x: norm(x).sum())):
            with pytest.raises(ShapeError, match="two or more values of each channel, and this batch has 1"):
                f(x)
        np.testing.assert_array_equal([norm.mean, norm.var], [[0, 0], [1, 1]])
        assert is_plain(norm)
        close(norm(x, training=False), O1[:1] / np.sqrt(1 + 1e-5), DTYPES[dtype.name])

    def test_one_value_left_by_a_mask_is_zero_and_no_update(self, dtype: jnp.dtype):
        norm = layer(2, dtype, variance="unbiased")
        y = norm(jnp.asarray(O1, dtype), mask=np.array([[False], [True], [False], [False]]))
        np.testing.assert_array_equal(np.asarray(y[1], np.float64), [0, 0])
        assert np.isfinite(np.asarray(y, np.float64)).all()
        np.testing.assert_array_equal([norm.mean, norm.var], [[0, 0], [1, 1]])

    def test_nothing_that_is_not_finite_enters(self, dtype: jnp.dtype):
        for value in (np.nan, np.inf, -np.inf):
            norm = layer(2, dtype)
            norm(jnp.asarray(np.where(np.arange(8).reshape(4, 2) == 2, value, O1), dtype))
            close([norm.mean, norm.var], [[0, 2.5], [1, 13.4]])

    def test_decay_is_the_weight_of_the_old(self):
        norm = nn.BatchNorm(1, decay=0.75)
        norm(np.float32([[2], [4]]))
        close([norm.mean, norm.var], [[0.75], [1.0]])
        with pytest.raises(ArgumentError, match=r"decay is not a number in \[0, 1\)"):
            nn.BatchNorm(1, decay=1.0)

    def test_torch_preset_ten_steps_and_an_evaluation(self):
        with jax.enable_x64(True):
            norm = nn.BatchNorm.preset("torch", 2, dtype=jnp.float64)
            step, mean, var, x = tether.jit(norm), np.zeros(2), np.ones(2), O1.astype(np.float64)
            for i in range(1, 11):
                step(jnp.asarray(x * i))
                mean, var = 0.9 * mean + 0.1 * i * x.mean(0), 0.9 * var + 0.1 * i * i * x.var(0, ddof=1)
            close([norm.mean, norm.var], [mean, var], 1e-12)
            close(norm(jnp.asarray(x), training=False), (x - mean) / np.sqrt(var + 1e-5), 1e-12)
