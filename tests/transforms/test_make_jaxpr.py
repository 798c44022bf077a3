# SPDX-License-Identifier: Apache-2.0
"""make_jaxpr: the jaxpr of a stateful function, its inputs and outputs, evaluated against plain JAX."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, MissedReadWarning

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def evaluated(jaxpr, *inputs):
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *inputs)


def test_inputs_and_outputs():
    """A training step: the inputs that the docstring promises, and what they give, against the step by hand."""
    unused, layer, calls, ran = tether.Param(jnp.ones(7)), nn.Linear(3, 2, key=jax.random.key(0)), tether.State(0), []
    seen, dropout = tether.State(0.0), nn.Dropout(0.5)

    def step(layer, batch, *, scale):
        ran.append(1)
        jax.debug.callback(lambda: ran.append("callback"))
        seen.value = batch["x"].sum()  # written, never read
        calls.value = calls.value + 1
        loss = lambda layer: (layer(batch["x"]) * dropout(batch["y"])).sum() * scale
        return unused.value.shape[0], tether.grad(loss)(layer)

    batch = {"x": X, "y": np.ones((4, 2), np.float32)}
    before = [*jax.tree.leaves(layer), calls.value]
    key = tether.pure(tether.random.draw).values()["tether.random.default"]
    jaxpr = tether.make_jaxpr(step)(layer, batch, scale=2.0)
    assert ran == [1]  # its Python, once; nothing was computed
    assert all(a is b for a, b in zip([*jax.tree.leaves(layer), calls.value], before, strict=True))

    uses, values = tether.uses(step)(layer, batch, scale=2.0), tether.pure(step).values(layer, batch, scale=2.0)
    touched = [path for path in values if path in uses.reads or path in uses.writes]
    assert set(touched) == {"layer.weight", "layer.bias", "unused", "calls", "seen", "tether.random.default"}
    inner = jaxpr.jaxpr
    assert [v.aval.shape for v in inner.invars] == [values[path].shape for path in touched] + [(4, 3), (4, 2), ()]

    other = {**values, "layer.weight": jnp.full((2, 3), 2.0), "calls": jnp.int32(41)}
    length, of_weight, of_bias, *new = evaluated(jaxpr, *[other[path] for path in touched], 10 * X, batch["y"], 3.0)
    after, drawn = jax.random.split(key)
    mask = np.asarray(jax.random.bernoulli(drawn, 0.5, (4, 2))) * 2.0 * 3.0
    np.testing.assert_allclose(of_weight, mask.T @ (10 * X), rtol=1e-5)
    np.testing.assert_allclose(of_bias, mask.sum(0), rtol=1e-6)
    assert length == 7 and list(uses.writes) == ["seen", "calls", "tether.random.default"]
    np.testing.assert_allclose(new[0], 10 * X.sum(), rtol=1e-5)
    assert int(new[1]) == 42
    np.testing.assert_array_equal(jax.random.key_data(new[2]), jax.random.key_data(after))


def test_shapes():
    norm = nn.BatchNorm(3)
    f = tether.make_jaxpr(lambda x, n: (norm(x), {"module": norm, "new": nn.Linear(n, 2)}), 1, return_shape=True)
    jaxpr, (y, modules) = f(jax.ShapeDtypeStruct((5, 3), jnp.float32), 4)
    assert (y.shape, y.dtype) == ((5, 3), jnp.float32)
    assert modules["module"] is norm and isinstance(modules["new"].weight, jax.ShapeDtypeStruct)
    assert modules["new"].weight.shape == (2, 4)
    named = tether.make_jaxpr(lambda x, n: x * n, static_argnums="n")(X, 4)
    assert len(named.jaxpr.invars) == 1


def test_axis_env():
    weight = tether.Param(3.0)
    f = lambda x: jax.lax.psum(weight.value * x, "lanes")
    jaxpr = tether.make_jaxpr(f, axis_env=[("lanes", 2)])(1.0)
    run = lambda x: evaluated(jaxpr, weight.value, x)[0]
    assert jax.vmap(run, axis_name="lanes")(jnp.array([1.0, 2.0])).tolist() == [9.0, 9.0]


def test_inside_other_transformations():
    layer = nn.Linear(3, 2, key=jax.random.key(0))

    def f(layer, x):
        jaxpr = tether.make_jaxpr(layer)(x)
        return evaluated(jaxpr, layer.weight, layer.bias, x)[0].sum()

    with jax.checking_leaks():
        gradient = tether.jit(tether.grad(f))(layer, X)
    np.testing.assert_allclose(gradient.weight, np.tile(X.sum(0), (2, 1)), rtol=1e-5)


def test_a_variable_that_only_reading_finds():
    hidden = types.MappingProxyType({"cell": tether.State(2.0)})
    with pytest.warns(MissedReadWarning, match="make_jaxpr"):
        jaxpr = tether.make_jaxpr(lambda x: hidden["cell"].value * x)(1.0)
    assert float(evaluated(jaxpr, 5.0, 3.0)[0]) == 15.0


def test_failures():
    calls = tether.State(0)

    def f(x, n=2):
        calls.value = calls.value + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tether.make_jaxpr(f)(1.0)
    assert int(calls.value) == 0
    with pytest.raises(ArgumentError, match="static_argnums"):
        tether.make_jaxpr(f, static_argnums=3)(1.0)
    with pytest.raises(ArgumentError, match="make_jaxpr"):
        tether.make_jaxpr(3)
