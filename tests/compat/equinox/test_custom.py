# SPDX-License-Identifier: Apache-2.0
"""Rules of one's own for functions of anything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tether.compat.equinox as eqx


def test_jvp_rule_gets_none_for_what_is_not_differentiated():
    seen = []

    @eqx.filter_custom_jvp
    def power(x, n, name):
        return x**n

    @power.defjvp
    def rule(primals, tangents):
        seen.append((primals[2], tangents[1:]))
        return power(*primals), 10 * tangents[0]

    assert float(power(3.0, 2, "a")) == 9.0
    assert float(jax.grad(lambda x: power(x, jnp.array(2), "a"))(3.0)) == 10.0
    assert float(jax.jit(jax.grad(lambda x, n: power(x, n, "a")))(3.0, 2)) == 10.0
    assert seen == [("a", (None, None))] * 2
    with pytest.raises(NotImplementedError, match="use defjvp"):
        power.defjvps(None)


def test_vjp_rules_get_the_arguments():
    @eqx.filter_custom_vjp
    def scale(pair, factor, *, name):
        x, text = pair
        return {"y": x * factor, "text": text, "n": jnp.array(3)}

    def forward(pair, factor, *, name):
        assert name == "a"
        return scale(pair, factor, name=name), pair[0] + 1

    def backward(residuals, cotangents, pair, factor, *, name):
        assert cotangents["n"] is None and cotangents["text"] is None and pair[1] == "text"
        return 100 * cotangents["y"] * factor + residuals, None

    with pytest.raises(RuntimeError, match="scale has no rules yet"):
        scale((1.0, "text"), 2, name="a")
    scale.defvjp(forward, backward)
    for jit in (lambda f: f, jax.jit):
        f = jit(lambda x: scale((x, "text"), 2, name="a")["y"])
        assert float(f(jnp.array(3.0))) == 6.0
        assert float(jit(jax.grad(f))(jnp.array(3.0))) == 100 * 2 + 4.0
    # Another argument has no gradient, though it is an array.
    by_factor = jax.grad(lambda factor: scale((jnp.array(3.0), "text"), factor, name="a")["y"])(jnp.array(2.0))
    assert float(by_factor) == 0.0


def test_a_python_number_has_a_gradient():
    f = eqx.filter_custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g, x: 10 * g)
    assert float(jax.grad(f)(2.0)) == 10.0


def test_a_gradient_of_another_structure():
    f = eqx.filter_custom_vjp(lambda x: x["a"] * 2)
    f.defvjp(lambda x: (x["a"] * 2, None), lambda _, g, x: g)
    with pytest.raises(RuntimeError, match="a gradient of another structure"):
        jax.grad(lambda a: f({"a": a}))(1.0 * jnp.ones(()))
