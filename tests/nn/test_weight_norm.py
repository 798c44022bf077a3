# SPDX-License-Identifier: Apache-2.0
"""WeightNorm against float64 NumPy and hand-written JAX, around layers of every kind and under transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._weight_norm import WeightNorm

RNG = np.random.default_rng(0)


def key(seed: int = 0):
    return jax.random.key(seed)


def oracle(v, scale, axes):
    v, scale = np.asarray(v, np.float64), np.asarray(scale, np.float64)
    others = tuple(axis for axis in range(v.ndim) if axis not in [a % v.ndim for a in axes])
    return scale * v / np.sqrt((v * v).sum(others, keepdims=True))


class Block(tether.Module):
    """A weight deep inside, statistics, and random numbers."""

    def __init__(self):
        self.linear = nn.Linear(3, 4, key=key(1))
        self.norm = nn.BatchNorm(4)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, *, factor=1.0):
        return self.drop(self.norm(self.linear(x) * factor))


@pytest.mark.parametrize(
    ("axis", "axes", "shape"),
    [
        (0, (0,), (4, 1, 1)),
        (-1, (2,), (1, 1, 2)),
        (1, (1,), (1, 3, 1)),
        ((0, 2), (0, 2), (4, 1, 2)),
        ([0, 1, 2], (0, 1, 2), (4, 3, 2)),
        (None, (), (1, 1, 1)),
    ],
)
def test_values(axis, axes, shape: tuple[int, ...]):
    conv = nn.Conv1d(3, 4, 2, key=key())
    layer, x = WeightNorm(conv, axis=axis), RNG.normal(size=(2, 3, 5)).astype(np.float32)
    assert layer.scale.shape == shape
    np.testing.assert_allclose(layer(x), conv(x), atol=1e-6)  # at first it changes nothing
    layer.scale = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    weight = jnp.asarray(oracle(conv.weight, layer.scale, axes), jnp.float32)
    wanted = jax.lax.conv_general_dilated(x, weight, (1,), "VALID") + conv.bias[None, :, None]
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-5, atol=1e-5)


def test_of_a_vector_and_of_a_table():
    bias = WeightNorm(nn.Linear(3, 4, key=key()), "bias", axis=None)
    bias.scale = jnp.asarray([2.0])
    linear = bias.layer
    wanted = np.ones(3) @ np.asarray(linear.weight).T + 2 * np.asarray(linear.bias) / np.linalg.norm(linear.bias)
    np.testing.assert_allclose(bias(jnp.ones(3)), wanted, rtol=1e-5)
    table = WeightNorm(nn.Embedding(5, 3, key=key()))
    table.scale = jnp.ones((5, 1))
    np.testing.assert_allclose(jnp.square(table(jnp.asarray([0, 4]))).sum(-1), np.ones(2), rtol=1e-5)


def test_gradients_are_those_of_the_formula():
    layer, x = WeightNorm(nn.Linear(3, 2, key=key())), RNG.normal(size=(4, 3)).astype(np.float32)

    def loss(v, scale, bias):
        weight = scale * v / jnp.sqrt((v * v).sum(1, keepdims=True))
        return ((x @ weight.T + jnp.broadcast_to(bias, (4, 2))) ** 2).sum()

    wanted = jax.grad(loss, argnums=(0, 1, 2))(layer.layer.weight, layer.scale, layer.layer.bias)
    for wrapped in (lambda f: f, tether.jit):
        grads = wrapped(tether.grad(lambda layer: (layer(x) ** 2).sum()))(layer)
        got = grads.layer.weight, grads.scale, grads.layer.bias
        for mine, right in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


def test_training_moves_what_the_formula_moves():
    """Three steps of gradient descent, beside hand-written ones."""
    layer, x = WeightNorm(nn.Linear(3, 2, use_bias=False, key=key())), RNG.normal(size=(4, 3)).astype(np.float32)
    v, scale = layer.layer.weight, layer.scale
    loss = lambda v, scale: ((x @ (scale * v / jnp.linalg.norm(v, axis=1, keepdims=True)).T) ** 2).sum()

    @tether.jit
    def step(layer):
        grads = tether.grad(lambda layer: (layer(x) ** 2).sum())(layer)
        layer.layer.weight = layer.layer.weight - 0.1 * grads.layer.weight
        layer.scale = layer.scale - 0.1 * grads.scale

    for _ in range(3):
        step(layer)
        of_v, of_scale = jax.grad(loss, argnums=(0, 1))(v, scale)
        v, scale = v - 0.1 * of_v, scale - 0.1 * of_scale
    np.testing.assert_allclose(layer.layer.weight, v, rtol=1e-4)
    np.testing.assert_allclose(layer.scale, scale, rtol=1e-4)
    assert step.traces == 1


@pytest.mark.parametrize("wrapped", [lambda f: f, tether.jit, tether.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_state_draws_and_arguments_of_the_layer_are_as_without(wrapped):
    plain, inner = Block(), Block()
    layer = WeightNorm(inner, "linear.weight")
    call = wrapped(lambda x, key: layer(x, factor=2.0, key=key))
    for number in range(2):
        x = RNG.normal(size=(6, 3)).astype(np.float32)
        wanted = plain(x, factor=2.0, key=key(number))
        np.testing.assert_allclose(call(x, key(number)), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inner.norm.mean, plain.norm.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inner.norm.var, plain.norm.var, rtol=1e-5)
    np.testing.assert_array_equal(inner.linear.weight, plain.linear.weight)
    evaluated = layer.eval()(x)
    np.testing.assert_allclose(evaluated, plain(x, training=False), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer(x, training=False), evaluated, rtol=1e-6)


def test_layers_one_after_another_in_a_loop():
    layers = tether.stack([WeightNorm(nn.Linear(3, 3, key=key(i))) for i in range(3)])
    layers.scale = 2 * layers.scale
    h, _ = tether.scan(lambda h, layer: (layer(h), None), jnp.ones(3), layers)
    wanted = np.ones(3)
    for i in range(3):
        linear = nn.Linear(3, 3, key=key(i))
        wanted = wanted @ (2 * np.asarray(linear.weight)).T + np.asarray(linear.bias)
    np.testing.assert_allclose(h, wanted, rtol=1e-4)


def test_many_made_and_called_in_lanes():
    keys = jax.random.split(key(), 3)
    layers = tether.vmap(lambda key: WeightNorm(nn.Linear(3, 2, key=key)))(keys)
    assert layers.scale.shape == (3, 2, 1)
    y = tether.vmap(lambda layer, x: layer(x))(layers, jnp.ones((3, 3)))
    wanted = [nn.Linear(3, 2, key=k)(jnp.ones(3)) for k in keys]
    np.testing.assert_allclose(y, np.stack(wanted), rtol=1e-5)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_under_plain_transformations(transform):
    layer = WeightNorm(nn.Linear(3, 3, use_bias=False, key=key()))
    layer.scale = 2 * layer.scale
    plain = lambda x: x @ (2 * layer.layer.weight).T
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_allclose(transform(layer)(x), transform(plain)(x), rtol=1e-4, atol=1e-5)


def test_a_tied_weight_and_a_shared_layer_are_their_own_outside():
    class Tied(tether.Module):
        def __init__(self):
            self.table = nn.Embedding(5, 3, key=key())
            self.head = WeightNorm(nn.Linear(3, 5, use_bias=False, key=key(1)))
            self.head.layer.weight = tether.cell(self.table, "weight")
            self.shared = WeightNorm(self.head.layer)

    model = Tied()
    assert list(tether.variables(model)) == ["table.weight", "head.scale", "shared.scale"]
    model.head.scale, model.shared.scale = jnp.ones((5, 1)), jnp.full((5, 1), 3.0)
    table, ids = np.asarray(model.table.weight), jnp.arange(5)
    unit = table / np.linalg.norm(np.asarray(model.head.layer.weight), axis=1, keepdims=True)
    np.testing.assert_allclose(model.head(jnp.ones(3)), unit @ np.ones(3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.shared(jnp.ones(3)), 3 * unit @ np.ones(3), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.table(ids), table)
    np.testing.assert_allclose(model.head.layer(jnp.ones(3)), table @ np.ones(3), rtol=1e-5, atol=1e-6)


def test_wrapped_twice_the_outer_length_counts():
    inner = WeightNorm(nn.Linear(3, 2, use_bias=False, key=key()))
    outer = WeightNorm(inner, "scale", axis=None)
    outer.scale = jnp.asarray([[2.0]])
    scale = np.asarray(inner.scale)
    weight = oracle(inner.layer.weight, 2 * scale / np.linalg.norm(scale), (0,))
    np.testing.assert_allclose(outer(jnp.ones(3)), weight @ np.ones(3), rtol=1e-5)


def test_views_and_paths():
    layer = WeightNorm(nn.Linear(3, 2, key=key()))
    grads = tether.grad(lambda layer: layer(jnp.ones(3)).sum())(tether.freeze(layer, "layer"))
    assert [path for path, cell in tether.variables(grads).items() if cell.value is not None] == ["scale"]
    assert list(tether.capture(layer, nn.Linear)(jnp.ones(3))[1]) == ["layer"]
    bound = tether.bind(layer, {"layer.weight": jnp.ones((2, 3))})
    wanted = layer.scale[:, 0] * np.sqrt(3) + layer.layer.bias
    np.testing.assert_allclose(bound(jnp.ones(3)), wanted, rtol=1e-5)


def test_dtypes():
    layer = WeightNorm(nn.Linear(1000, 2, use_bias=False, dtype=jnp.float16, weight_init=nn.init.constant(100.0)))
    assert (layer.scale.dtype, layer.layer.weight.dtype) == (jnp.float16, jnp.float16)
    np.testing.assert_allclose(layer.scale.astype(jnp.float32), np.full((2, 1), 100 * np.sqrt(1000)), rtol=1e-3)
    y = layer(jnp.full(1000, 1 / 1000, jnp.float16))  # the sum of squares is 1e7
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y.astype(jnp.float32), [100, 100], rtol=5e-3)


def test_a_weight_of_zeros_stays_one_and_has_a_gradient():
    layer = WeightNorm(nn.Linear(3, 2, use_bias=False, weight_init=nn.init.zeros))
    np.testing.assert_array_equal(layer(jnp.ones(3)), np.zeros(2))
    layer.scale = jnp.ones((2, 1))
    grads = tether.grad(lambda layer: layer(jnp.ones(3)).sum())(layer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_layer_without_that_param():
    with pytest.raises(ArgumentError) as caught:
        WeightNorm(nn.Linear(3, 2, key=key()), "kernel")
    assert str(caught.value) == (
        "WeightNorm: the layer has no Param of this name.\n"
        "  got:      name='kernel', and a Linear with weight, bias\n"
        "  expected: the name of a Param, that of a part with dots: 'part.weight'\n"
        "  fix:      name='weight'"
    )
    for name in ("norm.mean", "linear", "drop.p", "linear.weight.T", "", None):
        with pytest.raises(ArgumentError, match="and a Block with linear.weight, linear.bias, norm.weight, norm.bias"):
            WeightNorm(Block(), name)
    with pytest.raises(ArgumentError) as caught:
        WeightNorm(nn.Sequential([nn.Linear(3, 2, key=key())]))
    assert caught.value.got == "name='weight', and a Sequential with no Param"
    assert caught.value.fixes == ["wrap a layer inside it: one in a list or dict can't be named here"]


def test_an_inner_constructor_names_the_params_too():
    class Net(tether.Module):
        def __init__(self, name):
            self.layer = WeightNorm(Block(), name)

    assert Net("linear.weight").layer(jnp.ones((2, 3))).shape == (2, 4)
    with pytest.raises(ArgumentError, match="a Block with linear.weight, linear.bias"):
        Net("weight")


def test_what_is_no_layer():
    with pytest.raises(ArgumentError) as caught:
        WeightNorm(jnp.tanh)
    assert caught.value.what == "WeightNorm: what is to be wrapped is no layer."
    assert caught.value.expected == "a Module"


def test_axes_and_dtypes_are_checked():
    for axis in (2, -3, (0, 5), "0", True, 0.0):
        with pytest.raises(ShapeError, match="WeightNorm: the weight has no such axis") as caught:
            WeightNorm(nn.Linear(3, 2, key=key()), axis=axis)
        assert caught.value.expected == "an int in [-2, 2)"
    with pytest.raises(DtypeError, match="WeightNorm: weight is not real") as complex_:
        WeightNorm(nn.Linear(3, 2, dtype=jnp.complex64, weight_init=nn.init.zeros, bias_init=nn.init.zeros))
    assert complex_.value.got == "complex64[2, 3]"


def test_an_error_of_the_layer_says_where():
    with pytest.raises(ShapeError, match="Linear: the last axis of x is not in_features") as caught:
        WeightNorm(nn.Linear(3, 2, key=key()))(jnp.ones(4))
    assert caught.value.at == "layer  (Linear)"
