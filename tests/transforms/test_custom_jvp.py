# SPDX-License-Identifier: Apache-2.0
"""custom_jvp: what a rule is given and may return, and the errors for all else. See test_custom.py for the rest."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, GradientError, ShapeError, StructureError

X = jnp.array([1.0, 2.0, 3.0])
DX = jnp.array([0.5, -1.0, 2.0])


def rule_of(fun, rule, **options):
    f = tether.custom_jvp(fun, **options)
    assert f.defjvp(rule) is rule
    return f


@pytest.fixture
def layer():
    return nn.Linear(3, 2, key=jax.random.key(0))


def linear():
    """layer(x), with a tangent that is twice too large."""

    def rule(primals, tangents):
        (layer, x), (of_layer, of_x) = primals, tangents
        return layer(x), 2 * (of_layer(x) + layer.weight @ of_x)  # a module of tangents is called like any other

    return rule_of(lambda layer, x: layer(x), rule)


@pytest.mark.parametrize("around", [lambda fun: fun, tether.jit], ids=["eager", "jit"])
def test_forward_mode(layer, around):
    f, of_bias = linear(), jnp.array([3.0, -1.0])
    y, tangent = around(lambda layer, x: tether.jvp(f, (layer, x), ({"bias": of_bias}, DX)))(layer, X)
    np.testing.assert_allclose(y, layer.weight @ X + layer.bias, rtol=1e-6)
    np.testing.assert_allclose(tangent, 2 * (of_bias + layer.weight @ DX), rtol=1e-6)
    _, push = tether.linearize(f, layer, X)
    np.testing.assert_allclose(push(None, DX), 2 * (layer.weight @ DX), rtol=1e-6)
    jacobian = tether.jacfwd(around(f), argnums=1)(layer, X)
    np.testing.assert_allclose(jacobian, 2 * layer.weight, rtol=1e-6)


def test_tangents_of_modules_and_containers():
    seen = []

    def rule(primals, tangents):
        tree, (of_tree, of_n) = primals[0], tangents
        norm = of_tree["norm"]
        seen.append((norm.weight.shape, norm.mean.shape, norm.count is None, of_tree["name"], of_n.dtype))
        return tree["norm"].weight * tree["x"], of_tree["x"] * 5 + norm.weight

    class Norm(tether.Module):
        def __init__(self):
            self.weight, self.mean, self.count = tether.Param(jnp.ones(3)), tether.State(jnp.ones(3)), tether.State(0)

    f = rule_of(lambda tree, n: tree["norm"].weight * tree["x"], rule)
    norm = Norm()
    loss = lambda norm, x: f({"norm": norm, "x": x, "name": "no array"}, jnp.arange(2)).sum()
    of_norm, of_x = tether.grad(loss, argnums=(0, 1))(norm, X)
    np.testing.assert_allclose(of_norm.weight, np.ones(3))
    np.testing.assert_allclose(of_x, 5 * np.ones(3))
    assert seen == [((3,), (3,), True, None, jax.dtypes.float0)]


def test_results_of_trees_integers_and_modules(layer):
    """None is a tangent of zeros, at any place; a module of the result has a module of tangents."""

    def fun(x):
        return {"y": x * 2, "n": jnp.arange(2), "old": layer, "new": nn.Linear(2, 2, key=jax.random.key(1)), "z": x}

    def rule(primals, tangents):
        out = fun(*primals)
        of_new = jax.tree.map(lambda a: jnp.full(a.shape, tangents[0].sum()), out["new"])
        return out, {"y": 7 * tangents[0], "n": None, "old": None, "new": of_new, "z": None}

    f = rule_of(fun, rule)

    def loss(x):
        out = f(x)
        assert out["old"] is layer
        return out["y"].sum() + 10 * out["new"].bias.sum() + 1000 * out["z"].sum()

    for around in (lambda fun: fun, tether.jit):
        np.testing.assert_allclose(tether.grad(around(loss))(X), np.full(3, 27.0))


def test_defjvps(layer):
    f = tether.custom_jvp(lambda layer, x, y: {"a": layer(x), "b": y})
    f.defjvps(
        lambda of_layer, out, layer, x, y: {"a": 3 * of_layer.bias, "b": 0 * y},
        lambda of_x, out, layer, x, y: {"a": layer.weight @ of_x, "b": 0 * y},
        None,
    )
    loss = lambda layer, x, y: f(layer, x, y)["a"].sum() + f(layer, x, y)["b"]
    of_layer, of_x, of_y = tether.grad(loss, argnums=(0, 1, 2))(layer, X, 2.0)
    np.testing.assert_allclose(of_layer.bias, [3.0, 3.0])
    np.testing.assert_allclose(of_x, np.asarray(layer.weight).sum(0), rtol=1e-6)
    assert float(of_y) == 0.0
    constant = tether.custom_jvp(lambda x: x**2)
    constant.defjvps(None)
    assert float(tether.grad(constant)(3.0)) == 0.0


def test_nondiff_argnums(layer):
    @functools.partial(tether.custom_jvp, nondiff_argnums=(0, 2))
    def apply(fun, x, power, scale):
        return fun(x) ** power * scale

    @apply.defjvp
    def rule(fun, power, primals, tangents):
        assert fun is layer and power == 3
        (x, scale), (of_x, _) = primals, tangents
        return apply(fun, x, power, scale), 10 * (fun.weight @ of_x)

    for around in (lambda fun: fun, tether.jit):
        gradient = around(tether.grad(lambda x: apply(layer, x, 3, 1.0).sum()))(X)
        np.testing.assert_allclose(gradient, 10 * np.asarray(layer.weight).sum(0), rtol=1e-5)
    with pytest.raises(GradientError, match=r"(?s)no argument.*weight"):
        tether.grad(lambda layer: apply(layer, X, 3, 1.0).sum())(layer)
    scaled = rule_of(lambda x, y: x * y, lambda y, p, t: (p[0] * y, t[0] * y), nondiff_argnums="y")
    for around in (lambda fun: fun, tether.jit):  # an array among them is a constant
        assert [float(a) for a in around(tether.grad(scaled, argnums=(0, 1)))(2.0, jnp.float32(3.0))] == [3.0, 0.0]
    with pytest.raises(ArgumentError, match=r"(?s)defjvps.*nondiff_argnums.*defjvp\(rule\)"):
        scaled.defjvps(None)


def test_method_writes_its_state():
    class Scale(tether.Module):
        def __init__(self):
            self.weight, self.calls = tether.Param(2.0), tether.State(0)

        @tether.custom_jvp
        def __call__(self, x):
            self.calls = self.calls + 1
            return self.weight * x

        @__call__.defjvp
        def rule(primals, tangents):
            (self, x), (of_self, of_x) = primals, tangents
            return self(x), 5 * of_self.weight * x + 7 * of_x

    scale = Scale()
    for calls, around in enumerate((lambda fun: fun, tether.jit), 1):
        of_scale, of_x = around(tether.grad(lambda scale, x: scale(x), argnums=(0, 1)))(scale, 3.0)
        assert (float(of_scale.weight), float(of_x), int(scale.calls)) == (15.0, 7.0, calls)


def test_symbolic_zeros():
    seen = []

    def rule(primals, tangents):
        seen.append([isinstance(tangent, jax.custom_derivatives.SymbolicZero) for tangent in tangents])
        return primals[0] * primals[1], tangents[0] * primals[1]

    f = tether.custom_jvp(lambda x, y: x * y)
    f.defjvp(rule, symbolic_zeros=True)
    assert float(tether.grad(lambda x: f(x, 3.0))(2.0)) == 3.0 and seen == [[False, True]]


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (lambda y, t: y, StructureError, r"rule of f must return a pair.*float32\[3\].*\(result, tangent\)"),
        (
            lambda y, t: (y, (t,)),
            DtypeError,
            r"tangent that the rule of f returns.*another kind.*tuple of 1.*float32\[3\]",
        ),
        (lambda y, t: (y, t[:2]), ShapeError, r"another shape.*float32\[2\].*float32\[3\]"),
        (lambda y, t: (y, t > 0), DtypeError, r"another kind.*bool\[3\].*float32\[3\]"),
        (lambda y, t: ((y, y), (t, t, t)), StructureError, r"another structure.*\(\*, \*, \*\).*\(\*, \*\)"),
    ],
    ids=["no pair", "tree", "shape", "bool", "structure"],
)
def test_what_the_rule_returns(returned, error, said):
    def f(x):
        return x * 2

    f = rule_of(f, lambda primals, tangents: returned(primals[0] * 2, tangents[0]))
    for around in (lambda fun: fun, tether.jit):
        with pytest.raises(error, match=f"(?s){said}"):
            around(tether.grad(lambda x: jax.tree.leaves(f(x))[0].sum()))(X)


def test_other_results_than_those_of_the_function():
    f = rule_of(lambda x: x * 2, lambda primals, tangents: ((primals[0],), (tangents[0],)))
    with pytest.raises(StructureError, match=r"(?s)rule of <lambda> returns another structure than <lambda> itself"):
        tether.grad(tether.jit(f))(1.0)
    f.defjvps(None, None)
    with pytest.raises(ArgumentError, match=r"(?s)one rule for each argument.*2 rules for 1 arguments"):
        tether.grad(f)(1.0)
    with pytest.raises(ArgumentError, match="no function"):
        f.defjvps(3)
