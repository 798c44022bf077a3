# SPDX-License-Identifier: Apache-2.0
"""SpectralNorm against float64 NumPy and its singular values, around layers of every kind, under transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._spectral_norm import SpectralNorm

RNG = np.random.default_rng(0)


def key(seed: int = 0):
    return jax.random.key(seed)


def linear(seed: int = 0) -> nn.Linear:
    return nn.Linear(3, 4, use_bias=False, key=key(seed))


def matrix_of(weight, axis: int = 0):
    weight = np.moveaxis(np.asarray(weight, np.float64), axis, 0)
    return weight.reshape(len(weight), -1)


def iterated(matrix, u, v, steps: int):
    """The power iteration as in PyTorch: u first."""
    for _ in range(steps):
        u = matrix @ v
        u = u / np.linalg.norm(u)
        v = matrix.T @ u
        v = v / np.linalg.norm(v)
    return u, v


def weight_in(layer, size: int = 3, **options):
    """The weight that a wrapped Linear without bias computes with."""
    return np.asarray(layer(jnp.eye(size), **options)).T


class Block(tether.Module):
    """A weight deep inside, statistics, and random numbers."""

    def __init__(self):
        self.linear = nn.Linear(3, 4, key=key(1))
        self.norm = nn.BatchNorm(4)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, *, factor=1.0):
        return self.drop(self.norm(self.linear(x) * factor))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_steps_are_those_of_the_formula(steps: int, axis: int):
    layer = SpectralNorm(linear(), n_power_iterations=steps, axis=axis, key=key(1))
    matrix = matrix_of(layer.layer.weight, axis)
    u, v = (np.asarray(s, np.float64) for s in (layer.u, layer.v))
    assert (u.shape, v.shape) == ((matrix.shape[0],), (matrix.shape[1],))
    layer.layer.weight = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)  # u and v no longer fit
    matrix = matrix_of(layer.layer.weight, axis)
    for _ in range(3):
        u, v = iterated(matrix, u, v, steps)
        weight = np.asarray(layer.layer.weight) / (u @ matrix @ v)
        np.testing.assert_allclose(weight_in(layer), weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.u, u, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.v, v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(weight_in(layer, training=False), weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.u, u, rtol=1e-4, atol=1e-5)  # evaluation moved nothing


@pytest.mark.parametrize("axis", [0, 2])
def test_the_largest_singular_value_becomes_one(axis: int):
    conv = nn.Conv1d(2, 3, 2, use_bias=False, key=key(2))
    layer = SpectralNorm(conv, axis=axis, key=key(3))
    x = RNG.normal(size=(1, 2, 5)).astype(np.float32)
    for _ in range(40):
        y = layer(x)
    sigma = np.linalg.svd(matrix_of(conv.weight, axis), compute_uv=False)[0]
    np.testing.assert_allclose(y, conv(x) / sigma, rtol=1e-3, atol=1e-4)


def test_first_vectors_are_near_the_singular_ones():
    layer = SpectralNorm(nn.Linear(20, 30, key=key()), key=key(1))
    sigma = np.asarray(layer.u) @ np.asarray(layer.layer.weight) @ np.asarray(layer.v)
    right = np.linalg.svd(layer.layer.weight, compute_uv=False)[0]
    assert 0.95 * right < sigma <= 1.0001 * right
    np.testing.assert_allclose([np.linalg.norm(layer.u), np.linalg.norm(layer.v)], [1, 1], rtol=1e-5)
    again = SpectralNorm(nn.Linear(20, 30, key=key()), key=key(1))
    np.testing.assert_array_equal(again.u, layer.u)


@pytest.mark.parametrize("training", [True, False])
def test_gradient_has_u_and_v_as_constants(training: bool):
    layer, x = SpectralNorm(linear(), key=key(1)), RNG.normal(size=(4, 3)).astype(np.float32)
    u, v = np.asarray(layer.u), np.asarray(layer.v)
    if training:
        u, v = (s.astype(np.float32) for s in iterated(matrix_of(layer.layer.weight), u, v, 1))
    wanted = jax.grad(lambda w: ((x @ (w / (u @ w @ v)).T) ** 2).sum())(layer.layer.weight)
    for wrapped in (lambda f: f, tether.jit):
        again = tether.clone(layer)
        grads = wrapped(tether.grad(lambda layer: (layer(x, training=training) ** 2).sum()))(again)
        np.testing.assert_allclose(grads.layer.weight, wanted, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(again.u, u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapped", [lambda f: f, tether.jit, tether.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_state_draws_and_arguments_of_the_layer_are_as_without(wrapped):
    plain, inner = Block(), Block()
    layer = SpectralNorm(inner, "linear.weight", key=key())
    call = wrapped(lambda x, key: layer(x, factor=2.0, key=key))
    raw = np.asarray(inner.linear.weight)
    for number in range(2):
        x = RNG.normal(size=(6, 3)).astype(np.float32)
        y = call(x, key(number))
        sigma = np.asarray(layer.u) @ raw @ np.asarray(layer.v)
        plain.linear.weight = jnp.asarray(raw / sigma)
        np.testing.assert_allclose(y, plain(x, factor=2.0, key=key(number)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(inner.norm.mean, plain.norm.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inner.norm.var, plain.norm.var, rtol=1e-4)
    np.testing.assert_array_equal(inner.linear.weight, raw)
    np.testing.assert_allclose(layer.eval()(x), plain(x, training=False), rtol=1e-3, atol=1e-4)


def test_a_loop_carries_the_vectors():
    layer, right = SpectralNorm(linear(), key=key(1)), SpectralNorm(linear(), key=key(1))
    new = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    layer.layer.weight = right.layer.weight = new
    _, ys = tether.scan(lambda _, x: (None, layer(x)), None, jnp.ones((4, 3)))
    u, v = iterated(matrix_of(new), *(np.asarray(s, np.float64) for s in (right.u, right.v)), 4)
    np.testing.assert_allclose(layer.u, u, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ys[-1], np.asarray(new) @ np.ones(3) / (u @ matrix_of(new) @ v), rtol=1e-4, atol=1e-5)


def test_lanes_that_share_the_layer_move_the_vectors_once():
    layer, right = SpectralNorm(linear(), key=key(1)), SpectralNorm(linear(), key=key(1))
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    for vmap in (tether.vmap, jax.vmap):
        np.testing.assert_allclose(vmap(layer)(x), right(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.u, right.u, rtol=1e-5, atol=1e-6)


def test_many_made_and_called_in_lanes_move_their_own():
    keys = jax.random.split(key(), 3)
    layers = tether.vmap(lambda key: SpectralNorm(nn.Linear(3, 4, use_bias=False, key=key), key=key))(keys)
    singles = [SpectralNorm(nn.Linear(3, 4, use_bias=False, key=k), key=k) for k in keys]
    y = tether.vmap(lambda layer: layer(jnp.ones(3)))(layers)
    np.testing.assert_allclose(y, np.stack([single(jnp.ones(3)) for single in singles]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layers.u, np.stack([single.u for single in singles]), rtol=1e-4, atol=1e-5)


def test_plain_jit_keeps_the_vectors():
    layer, right = SpectralNorm(linear(), key=key(1)), SpectralNorm(linear(), key=key(1))
    step = jax.jit(layer)
    for _ in range(2):
        np.testing.assert_allclose(step(jnp.ones(3)), right(jnp.ones(3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.u, right.u, rtol=1e-5, atol=1e-6)
    pure = tether.pure(layer)
    y, new = jax.jit(pure)(pure.values(), jnp.ones(3))
    assert {"u", "v", "layer.weight"} <= set(new)
    np.testing.assert_array_equal(new["layer.weight"], layer.layer.weight)


def test_used_twice_in_one_step():
    """As a discriminator is, on real and on made-up examples: each call iterates once."""
    layer = SpectralNorm(linear(), key=key(1))
    layer.layer.weight = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    matrix, u, v = matrix_of(layer.layer.weight), np.asarray(layer.u), np.asarray(layer.v)
    tether.jit(tether.grad(lambda layer: (layer(jnp.ones(3)) - layer(jnp.zeros(3))).sum()))(layer)
    np.testing.assert_allclose(layer.u, iterated(matrix, u, v, 2)[0], rtol=1e-4, atol=1e-5)


def test_a_tied_weight_is_its_own_outside():
    class Tied(tether.Module):
        def __init__(self):
            self.first = nn.Linear(3, 3, use_bias=False, key=key())
            self.second = SpectralNorm(nn.Linear(3, 3, use_bias=False, key=key(1)), key=key(2))
            self.second.layer.weight = tether.cell(self.first, "weight")

    model = Tied()
    assert list(tether.variables(model, tether.Param)) == ["first.weight"]
    raw = np.asarray(model.first.weight)
    for _ in range(30):
        divided = weight_in(model.second)
    np.testing.assert_allclose(divided, raw / np.linalg.norm(raw, 2), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weight_in(model.first), raw, rtol=1e-5, atol=1e-6)
    grads = tether.grad(lambda model: (model.first(jnp.ones(3)) + model.second(jnp.ones(3))).sum())(model)
    assert grads.first.weight.shape == (3, 3)


def test_inside_other_layers_and_around_itself():
    layers = [SpectralNorm(linear(), key=key()), nn.Lambda(jax.nn.relu)]
    net = nn.Sequential(layers)
    assert list(tether.capture(net, nn.Linear)(jnp.ones(3))[1]) == ["[0].layer"]
    twice = SpectralNorm(SpectralNorm(linear(), key=key()), "layer.weight", key=key(1))
    for _ in range(30):
        weight = weight_in(twice)
    raw = np.asarray(twice.layer.layer.weight)
    np.testing.assert_allclose(weight, raw / np.linalg.norm(raw, 2), rtol=1e-3, atol=1e-4)
    assert list(tether.variables(twice)) == ["layer.layer.weight", "layer.u", "layer.v", "u", "v"]


def test_dtypes():
    layer = SpectralNorm(nn.Linear(3, 4, use_bias=False, dtype=jnp.bfloat16, key=key()), key=key())
    assert (layer.u.dtype, layer.v.dtype, layer.layer.weight.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    y = layer(jnp.ones(3, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and layer.u.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = SpectralNorm(nn.Linear(3, 4, use_bias=False, dtype=jnp.float64, key=key()), key=key())
        for _ in range(200):
            wide(jnp.ones(3))
        sigma = float(jnp.dot(wide.u, wide.layer.weight @ wide.v))
        assert sigma == pytest.approx(np.linalg.svd(wide.layer.weight, compute_uv=False)[0], rel=1e-10)


def test_a_weight_of_zeros_stays_one():
    layer = SpectralNorm(nn.Linear(3, 4, use_bias=False, weight_init=nn.init.zeros), key=key())
    np.testing.assert_array_equal(layer(jnp.ones(3)), np.zeros(4))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(layer))
    grads = tether.grad(lambda layer: layer(jnp.ones(3)).sum())(layer)
    assert np.isfinite(grads.layer.weight).all()


def test_a_call_that_fails_moves_nothing():
    layer = SpectralNorm(linear(), key=key(1))
    before = np.asarray(layer.u)
    layer.layer.weight = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    with pytest.raises(ShapeError, match="Linear: the last axis of x") as caught:
        layer(jnp.ones(5))
    assert caught.value.at == "layer  (Linear)"
    np.testing.assert_array_equal(layer.u, before)


def test_a_vector_has_no_singular_values():
    with pytest.raises(ShapeError) as caught:
        SpectralNorm(nn.Linear(3, 2, key=key()), "bias")
    assert str(caught.value) == (
        "SpectralNorm: bias is no matrix, and has no singular values.\n"
        "  got:      float32[2]\n"
        "  expected: a weight of at least 2 axes\n"
        "  fix:      nn.WeightNorm(layer, name, axis=None) divides a vector by its length"
    )


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="SpectralNorm: the layer has no Param of this name") as caught:
        SpectralNorm(linear(), "kernel")
    assert caught.value.got == "name='kernel', and a Linear with weight"
    with pytest.raises(ArgumentError, match="SpectralNorm: what is to be wrapped is no layer"):
        SpectralNorm(jnp.tanh)  # pyright: ignore[reportArgumentType]
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ArgumentError, match="SpectralNorm: n_power_iterations is not an integer of at least 1"):
            SpectralNorm(linear(), n_power_iterations=steps)
    for eps in (0, -1e-12, float("nan"), "0"):
        with pytest.raises(ArgumentError, match="SpectralNorm: eps is not a positive number"):
            SpectralNorm(linear(), eps=eps)
    for axis in (2, -3, True, None):
        with pytest.raises(ShapeError, match="SpectralNorm: the weight has no such axis") as of_axis:
            SpectralNorm(linear(), axis=axis)
        assert of_axis.value.fixes == ["axis=0, that of the outputs"]
    zeros = nn.init.zeros
    with pytest.raises(DtypeError, match="SpectralNorm: weight is not real"):
        SpectralNorm(nn.Linear(3, 2, dtype=jnp.complex64, use_bias=False, weight_init=zeros))
