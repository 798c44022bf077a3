# SPDX-License-Identifier: Apache-2.0
"""filter_jit: what is traced, what is static, and how often a function is traced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import tether
import tether.compat.equinox as eqx


class Scale(eqx.Module):
    factor: jax.Array
    name: str

    def __call__(self, x):
        return self.factor * x

    def shifted(self, x, by):
        return self.factor * x + by


def counted(f):
    """The function, and the list of its arguments each time that it ran."""
    calls = []

    @functools.wraps(f)
    def run(*args, **kwargs):
        calls.append((args, kwargs))
        return f(*args, **kwargs)

    return run, calls


def test_arrays_are_traced_and_the_rest_is_static():
    f, calls = counted(lambda x, n, flag: x * n if flag else (x, "off"))
    g = eqx.filter_jit(f)
    assert g(jnp.ones(2), 3, True).tolist() == [3, 3] == g(jnp.ones(2), 3, True).tolist()
    assert g(jnp.ones(2), 3, False)[1] == "off"
    assert len(calls) == 2 and isinstance(calls[0][0][0], jax.core.Tracer)


def test_a_module_is_traced_once_for_each_static_value():
    f, calls = counted(lambda scale, x: scale(x))
    g = eqx.filter_jit(f)
    assert [float(g(Scale(jnp.array(a), "a"), 1.0)) for a in (2.0, 3.0)] == [2.0, 3.0]
    g(Scale(jnp.array(2.0), "b"), 1.0)
    assert len(calls) == 2


def test_the_arrays_of_a_module_that_is_compiled_itself_are_inputs():
    a, b = Scale(jnp.array(2.0), "a"), Scale(jnp.array(3.0), "a")
    assert (float(eqx.filter_jit(a)(jnp.array(5.0))), float(eqx.filter_jit(b)(jnp.array(5.0)))) == (10, 15)
    assert float(eqx.filter_jit(b.shifted)(jnp.array(5.0), by=1)) == 16


def test_as_a_decorator_of_a_method():
    class Counter(eqx.Module):
        start: jax.Array

        @eqx.filter_jit
        def after(self, steps):
            return self.start + steps

    assert int(Counter(jnp.array(3)).after(4)) == 7
    assert Counter.after.__name__ == "after"


def test_specifications_by_argument():
    f, calls = counted(lambda x, n, *more, **named: x * n + sum(more) + named.get("z", 0))
    g = eqx.filter_jit(f, args=(True, True), kwargs={"z": True})
    assert [int(g(1, n, z=z)) for n, z in [(2, 3), (4, 5)]] == [5, 9]
    assert len(calls) == 1
    g(1, 2, 7), g(1, 2, 8)
    assert len(calls) == 3  # what *more holds has the default, and is no array


def test_default_and_out():
    g = eqx.filter_jit(default=lambda leaf: isinstance(leaf, float), out=lambda leaf: not isinstance(leaf, str))
    out = g(lambda x, n: (x * n, n, "text"))(2.0, 3)
    assert isinstance(out[0], jax.Array) and isinstance(out[1], jax.Array) and out[2] == "text"


def test_the_old_name_of_specifications_warns():
    with pytest.warns(DeprecationWarning, match="filter_spec= is deprecated"):
        g = eqx.filter_jit(lambda x, n: x * n, filter_spec=([True, False], {}))
    assert int(g(2, 3)) == 6
    with pytest.raises(ValueError, match="together with the arguments that replaced it"):
        eqx.filter_jit(lambda x: x, filter_spec=True, default=True)


def test_a_static_argument_that_has_no_hash():
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        eqx.filter_jit(lambda x, s: x)(jnp.ones(2), {1, 2})


def test_specifications_that_do_not_fit_the_signature():
    with pytest.raises(ValueError, match="args= and kwargs= don't fit the signature") as caught:
        eqx.filter_jit(lambda x: x, args=(True, False))
    assert "too many positional arguments" in str(caught.value) and "expected: (x)" in str(caught.value)


def test_lower():
    text = eqx.filter_jit(lambda x, n: x * n).lower(jnp.ones(2), 3).as_text()
    assert "multiply" in text


def test_a_model_of_tethers_that_is_closed_over():
    model = tether.nn.BatchNorm(2)
    x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    f = eqx.filter_jit(lambda x: model(x, training=True))
    f(x), f(x)
    # Twice 0.9 * old + 0.1 * batch, from 0; the batch has the means 2 and 4.
    assert jnp.allclose(model.mean, 0.19 * jnp.array([2.0, 4.0]))


def test_nested():
    f, calls = counted(lambda x, n: x + n)
    g = eqx.filter_jit(eqx.filter_jit(f))
    assert int(g(jnp.array(1), 2)) == 3 == int(g(jnp.array(1), 2)) and len(calls) == 1
