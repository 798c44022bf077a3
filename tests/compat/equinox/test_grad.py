# SPDX-License-Identifier: Apache-2.0
"""Derivatives of functions of anything, against jax.grad of the arrays alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tether.compat.equinox as eqx


class Affine(eqx.Module):
    w: jax.Array
    b: jax.Array
    activation: object

    def __call__(self, x):
        return self.activation(self.w * x + self.b)


def affine() -> Affine:
    return Affine(jnp.array(0.5), jnp.array(-0.25), jnp.tanh)


def test_gradient_by_the_arrays_of_the_first_argument():
    gradient = eqx.filter_grad(lambda m, x: m(x))(affine(), 3.0)
    by_w, by_b = jax.grad(lambda w, b: jnp.tanh(w * 3.0 + b), argnums=(0, 1))(0.5, -0.25)
    assert (float(gradient.w), float(gradient.b)) == (float(by_w), float(by_b))
    assert gradient.activation is None


def test_a_frozen_part():
    spec = eqx.tree_at(lambda m: m.b, jax.tree.map(lambda _: False, affine()), True)
    value, gradient = eqx.filter_value_and_grad(lambda m, x: m(x), arg=spec)(affine(), 3.0)
    assert float(value) == float(jnp.tanh(1.25)) and gradient.w is None and gradient.b is not None


def test_aux_may_be_anything():
    gradient, aux = eqx.filter_grad(lambda x: (x**2, "aux"), has_aux=True)(jnp.array(3.0))
    assert (float(gradient), aux) == (6.0, "aux")
    (value, aux), gradient = eqx.filter_value_and_grad(has_aux=True)(lambda x: (x**2, "aux"))(jnp.array(3.0))
    assert (float(value), float(gradient), aux) == (9.0, 6.0, "aux")


def test_as_a_decorator_of_a_method():
    class Square(eqx.Module):
        x: jax.Array

        @eqx.filter_grad
        def gradient(self):
            return self.x**2

    assert float(Square(jnp.array(3.0)).gradient().x) == 6.0


def test_old_name_and_argnums():
    with pytest.warns(DeprecationWarning, match="use arg="):
        assert float(eqx.filter_grad(lambda x: x**2, filter_spec=True)(3.0)) == 6.0
    with pytest.raises(ValueError, match="the gradient is by the first argument"):
        eqx.filter_grad(lambda x, y: x * y, argnums=1)


def test_jvp():
    f = lambda x, y, n: (x**n, y, "text")
    out, tangents = eqx.filter_jvp(f, (jnp.array(3.0), jnp.array(4.0), 2), (jnp.array(0.5), None, None))
    assert (float(out[0]), float(out[1]), out[2]) == (9.0, 4.0, "text")
    assert float(tangents[0]) == 3.0 and tangents[1:] == (None, None)
    with pytest.raises(ValueError, match="different structures"):
        eqx.filter_jvp(f, (1.0, 2.0, 3), (1.0, None))
    with pytest.raises(TypeError):
        eqx.filter_jvp(f, (jnp.array(3.0), jnp.array(4.0), 2), (jnp.array(1), None, None))


def test_vjp():
    value, vjp_fn = eqx.filter_vjp(lambda m, x, n: (m(x) * n, n), affine(), jnp.array(3.0), 2)
    by_m, by_x, by_n = vjp_fn((jnp.array(1.0), None))
    expected = jax.grad(lambda w, x: 2 * jnp.tanh(w * x - 0.25), argnums=(0, 1))(0.5, 3.0)
    assert value[1] == 2 and (float(by_m.w), float(by_x)) == tuple(map(float, expected)) and by_n is None
    _, vjp_fn, aux = eqx.filter_vjp(lambda x: (x**2, "aux"), jnp.array(3.0), has_aux=True)
    assert float(vjp_fn(jnp.array(1.0))[0]) == 6.0 and aux == "aux"


def test_closure_convert():
    def outer(a):
        double = eqx.filter_closure_convert(lambda x: (a * x, "text"), 1.0)
        assert [const is a for const in double.consts] == [True]
        value, text = jax.tree.map(lambda leaf: leaf, double)(1.0)
        assert text == "text"
        return value

    assert float(jax.grad(outer)(3.0)) == 1.0
    assert eqx.filter_closure_convert(test_vjp) is test_vjp
