# SPDX-License-Identifier: Apache-2.0
"""Laws that every layer obeys, run on every row of the table. What a layer computes is tested in its own file."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.laws.layers import BATCH, LAYERS, Layer
from tether.errors import ShapeError

rows = pytest.mark.parametrize("row", LAYERS, ids=lambda row: row.name)
floating_rows = pytest.mark.parametrize("row", [row for row in LAYERS if row.floating], ids=lambda row: row.name)
free_rows = pytest.mark.parametrize("row", [row for row in LAYERS if row.any_batch], ids=lambda row: row.name)
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
KEY = 11


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=tolerance, atol=tolerance)


def avals(module: tether.Module) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype, jax.typeof(leaf).weak_type) for leaf in jax.tree.leaves(module)]


def values(module: tether.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(module)]


def trained(row: Layer) -> tether.Module:
    """The layer after one training step, so that running statistics are not the identity."""
    module = row.make()
    module(row.input(), training=True, key=jax.random.key(KEY))
    return module


@rows
def test_flatten_and_unflatten_are_inverse(row: Layer):
    module = trained(row)
    leaves, treedef = jax.tree.flatten(module)
    again = jax.tree.unflatten(treedef, leaves)
    assert type(again) is type(module)
    assert jax.tree.structure(again) == treedef
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    close(again.eval()(row.input()), module.eval()(row.input()), 0)


@rows
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), tether.clone])
def test_a_copy_computes_the_same(row: Layer, copied: Any):
    module = trained(row)
    close(copied(module)(row.input(), training=False), module(row.input(), training=False), 0)


@rows
@modes
def test_jit_computes_what_eager_does(row: Layer, training: bool):
    eager, jitted = row.make(), row.make()
    step = tether.jit(lambda x, key: jitted(x, training=training, key=key))
    for number in range(3):
        x, key = row.input(), jax.random.key(number)
        close(step(x, key), eager(x, training=training, key=key))
    for got, wanted in zip(values(jitted), values(eager), strict=True):
        close(got, wanted)
    assert step.traces == 1


@rows
@modes
def test_structure_and_avals_stay(row: Layer, training: bool):
    module = row.make()
    before = jax.tree.structure(module), avals(module)
    for x in (row.input(), row.input() + np.asarray(1, row.input().dtype)) if row.floating else (row.input(),):
        module(x, training=training)
        assert (jax.tree.structure(module), avals(module)) == before
        tether.jit(module)(x, training=training)
        assert (jax.tree.structure(module), avals(module)) == before
    assert not any(weak for _, _, weak in avals(module))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(module))


@rows
def test_evaluation_writes_and_draws_nothing(row: Layer):
    module = row.make()
    before = values(module)
    used = tether.uses(lambda x: module(x, training=False))(row.input())
    assert not used.writes
    assert not any(isinstance(variable, tether.Rng) for variable in used.reads.values())
    first, second = (module(row.input(), training=False) for _ in range(2))
    close(first, second, 0)
    for got, wanted in zip(values(module), before, strict=True):
        close(got, wanted, 0)


@free_rows
@pytest.mark.parametrize("leading", [(), (3, 2)], ids=str)
def test_any_number_of_batch_axes(row: Layer, leading: tuple[int, ...]):
    module = trained(row).eval()
    x = row.input()
    x = x[0] if leading == () else x[: int(np.prod(leading))].reshape(leading + x.shape[1:])
    one_by_one = module
    for _ in leading:
        one_by_one = jax.vmap(one_by_one)
    close(module(x), one_by_one(x))


@free_rows
def test_one_example_under_vmap_is_a_row_of_the_batch(row: Layer):
    module = trained(row).eval()
    x, y = row.input(), module(row.input())
    assert y.shape[0] == BATCH
    close(jax.vmap(module)(x), y)
    close(tether.vmap(module)(x), y)
    close(np.stack([module(example) for example in x]), y)


@rows
def test_evaluation_of_a_row_does_not_depend_on_the_others(row: Layer):
    module = trained(row).eval()
    x = row.input()
    others = x.copy()
    others[1:] = np.nan if row.floating else (x[1:] + 1) % 7
    close(module(others)[0], module(x)[0])
    if row.any_batch:
        close(module(x[:1])[0], module(x)[0])


@floating_rows
@modes
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_floating_dtype_in_is_dtype_out(row: Layer, training: bool, dtype: Any):
    module = row.make()
    x = jnp.asarray(row.input()).astype(dtype)
    key = jax.random.key(KEY)
    y = module(x, training=training, key=key)
    wide = row.make()(x.astype(jnp.float32), training=training, key=key)
    assert (y.dtype, wide.dtype) == (dtype, jnp.float32)
    close(y.astype(jnp.float32), wide, 0.1)
    assert {leaf.dtype for leaf in jax.tree.leaves(module)} <= {jnp.dtype(t) for t in (jnp.float32, jnp.int32)}


@floating_rows
def test_numpy_float64_is_taken_as_the_default_float(row: Layer):
    module = row.make().eval()
    y = jnp.asarray(module(row.input().astype(np.float64)))  # Identity gives back the NumPy array
    assert y.dtype == jnp.float32
    close(y, module(row.input()))


@rows
def test_compute_dtype_is_the_dtype_out(row: Layer):
    module = row.make().eval()
    if not any("compute_dtype" in vars(part) for part in tether.modules(module).values()):
        pytest.skip("computes nothing of its own")
    x = row.input().astype(np.float16) if row.floating else row.input()
    lowered = tether.view(module, compute_dtype=jnp.bfloat16)
    assert lowered(x).dtype == jnp.bfloat16
    close(lowered(x).astype(jnp.float32), module(row.input()), 0.1)
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(lowered))


wrong = [(row, shape) for row in LAYERS for shape in row.wrong]


@pytest.mark.parametrize(("row", "shape"), wrong, ids=lambda value: getattr(value, "name", str(value)))
@modes
def test_wrong_shape_is_an_error_that_names_the_layer(row: Layer, shape: tuple[int, ...], training: bool):
    module = row.make()
    before = values(module)
    with pytest.raises(ShapeError, match=row.blames or row.name.split()[0]) as caught:
        tether.jit(module)(jnp.ones(shape), training=training)
    assert caught.value.got and caught.value.expected and caught.value.fixes
    assert "float32[" in caught.value.got
    assert caught.value.at is not None
    for got, wanted in zip(values(module), before, strict=True):
        close(got, wanted, 0)
    with pytest.raises(ShapeError) as eager:
        module(jnp.ones(shape), training=training)
    assert str(eager.value) == str(caught.value)


@floating_rows
def test_gradient_of_the_input_agrees_with_differences(row: Layer):
    """Along one direction, for a weighted sum: float32 arithmetic, so the tolerance is wide."""
    module = trained(row).eval()
    x = jnp.asarray(row.input())
    weights, direction = (jnp.asarray(np.random.default_rng(i).normal(size=x.shape), x.dtype) for i in (1, 2))
    weights = jnp.resize(weights, module(x).shape)
    grad = jax.grad(lambda x: (weights * module(x)).sum())(x)
    step = 1e-3
    up, down = (np.asarray(module(x + sign * step * direction), np.float64) for sign in (1, -1))
    slope = (np.asarray(weights, np.float64) * (up - down)).sum() / (2 * step)
    close((grad * direction).sum(), slope, 2e-2)
