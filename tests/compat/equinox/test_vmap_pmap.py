# SPDX-License-Identifier: Apache-2.0
"""filter_vmap and filter_pmap, against jax.vmap of the arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tether.compat.equinox as eqx

MAPS = {
    "vmap": eqx.filter_vmap,
    "pmap": lambda *args, **kwargs: eqx.filter_pmap(
        *args, devices=jax.devices()[: kwargs.get("axis_size", 2)], **kwargs
    ),
}


@pytest.fixture(params=MAPS)
def mapped(request):
    return MAPS[request.param]


def test_arrays_are_mapped_and_the_rest_is_shared(mapped):
    out = mapped(lambda x, n: (x * n, "text"))(jnp.arange(6.0).reshape(2, 3), 2)
    assert out[0].tolist() == [[0, 2, 4], [6, 8, 10]] and out[1] == "text"


def test_axes_by_argument(mapped):
    f = lambda x, y, *, z=1: x + y * z
    x, y = jnp.arange(6.0).reshape(3, 2), jnp.arange(3.0)
    expected = jax.vmap(f, in_axes=(1, None))(x, y)
    assert mapped(f, args=(1, None))(x, y).tolist() == expected.tolist()
    assert mapped(f, kwargs={"x": 1, "y": None}, default=None)(x, y, z=1).tolist() == expected.tolist()
    assert mapped(f, args=(1, None), out=1)(x, y).tolist() == expected.T.tolist()


def test_a_module_with_a_row_for_each_lane(mapped, key):
    class Scale(eqx.Module):
        factor: jax.Array
        name: str

        def __call__(self, x):
            return self.factor * x

    scales = Scale(jnp.array([2.0, 3.0]), "a")
    of_arrays = lambda leaf: 0 if eqx.is_array(leaf) else None
    assert mapped(scales, default=None, fn=of_arrays)(jnp.array(5.0)).tolist() == [10, 15]
    assert mapped(lambda scale, x: scale(x), args=(of_arrays, None))(scales, jnp.array(5.0)).tolist() == [10, 15]


def test_an_ensemble(key):
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(jax.random.split(key, 4))
    alone = [eqx.nn.Linear(2, 3, key=k) for k in jax.random.split(key, 4)]
    x = jax.random.normal(key, (4, 2))
    out = eqx.filter_vmap(lambda layer, x: layer(x))(layers, x)
    assert jnp.allclose(out, jnp.stack([layer(row) for layer, row in zip(alone, x, strict=True)]))


def test_named_axes(mapped):
    out = mapped(lambda x: jax.lax.psum(x, "lanes"), axis_name="lanes")(jnp.array([1.0, 2.0]))
    assert out.tolist() == [3, 3]


def test_a_size_and_nothing_mapped(mapped):
    f = lambda x: x
    assert mapped(f, default=None, out=0, axis_size=2)(jnp.array([3, 4])).tolist() == [[3, 4], [3, 4]]
    assert mapped(f, default=None, out=None, axis_size=2)(jnp.array([3, 4])).tolist() == [3, 4]


def test_as_a_decorator_of_a_method(mapped):
    class Shift(eqx.Module):
        by: int

        @mapped
        def __call__(self, x):
            return x + self.by

    assert Shift(3)(jnp.array([1, 2])).tolist() == [4, 5]


def test_sizes_that_differ(mapped):
    with pytest.raises(ValueError, match="inconsistent sizes"):
        mapped(lambda x, y: x)(jnp.ones(2), jnp.ones(3))


def test_something_else_as_an_axis(mapped):
    with pytest.raises(ValueError, match="a specification of axes holds something else"):
        mapped(lambda x: x, args=("first",))(jnp.ones(2))


def test_pmap_traces_what_is_true_and_keeps_what_is_false():
    traces = []
    f = eqx.filter_pmap(lambda x, n: traces.append(n) or x * n, args=(0, False), devices=jax.devices()[:2])
    assert f(jnp.arange(2.0), 3).tolist() == [0, 3]
    before = len(traces)
    f(jnp.arange(2.0) + 1, 3)
    assert len(traces) == before and isinstance(traces[-1], int)
    f(jnp.arange(2.0), 4)
    assert len(traces) > before
    assert "multiply" in f.lower(jnp.arange(2.0), 3).as_text()


def test_pmap_with_an_axis_that_no_result_has():
    with pytest.raises(ValueError, match="out= asks for an axis that no result has"):
        eqx.filter_pmap(lambda x: x, out=3, devices=jax.devices()[:2])(jnp.ones(2))
