# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: what a rule is given and may return, and the errors for all else. See test_custom.py for the rest."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import (
    ArgumentError,
    DtypeError,
    GradientError,
    LeakError,
    SelectionError,
    ShapeError,
    StructureError,
)

X = jnp.array([1.0, 2.0, 3.0])
G = np.array([0.5, -2.0], np.float32)  # the cotangent of the result, in most tests


def rule_of(fun, fwd, bwd, **options):
    f = tether.custom_vjp(fun, **options)
    f.defvjp(fwd, bwd)
    return f


def linear_with(bwd, residuals=lambda layer, x: (layer, x)):
    """layer(x), with this backward pass."""
    return rule_of(lambda layer, x: layer(x), lambda layer, x: (layer(x), residuals(layer, x)), bwd)


def gradients(f, *args, **options):
    return tether.grad(lambda *args: (f(*args) * G).sum(), argnums=tuple(range(len(args))), **options)(*args)


@pytest.fixture
def layer():
    return nn.Linear(3, 2, key=jax.random.key(0))


class TestCotangents:
    """Of modules and containers, in every form that a rule may return them in."""

    @pytest.mark.parametrize(
        "of_layer",
        [
            lambda layer, x, g: {"weight": 3 * jnp.outer(g, x), "bias": 3 * g},
            lambda layer, x, g: jax.tree.map(lambda a: 3 * a, tether.grad(lambda m: (m(x) * g).sum())(layer)),
            lambda layer, x, g: tether.bind(layer, {"weight": 3 * jnp.outer(g, x), "bias": 3 * g}),
        ],
        ids=["by path", "module", "all cells"],
    )
    def test_of_a_module(self, layer, of_layer):
        f = linear_with(lambda residuals, g: [of_layer(*residuals, g), None])
        of_module, of_x = gradients(f, layer, X)
        np.testing.assert_allclose(of_module.weight, 3 * np.outer(G, X), rtol=1e-6)
        np.testing.assert_allclose(of_module.bias, 3 * G, rtol=1e-6)
        np.testing.assert_array_equal(of_x, np.zeros(3))

    def test_zeros(self, layer):
        f = linear_with(lambda residuals, g: ({"bias": g, "weight": None}, g @ residuals[0].weight))
        of_module, of_x = tether.jit(functools.partial(gradients, f))(layer, X)
        np.testing.assert_array_equal(of_module.weight, np.zeros((2, 3)))
        np.testing.assert_allclose(of_x, G @ np.asarray(layer.weight), rtol=1e-6)
        of_module, of_x = gradients(linear_with(lambda residuals, g: (None, None)), layer, X)
        assert not any(leaf.any() for leaf in [of_x, *jax.tree.leaves(of_module)])

    def test_of_containers_numbers_and_integers(self, layer):
        def bwd(residuals, g):
            return {"pair": (g.sum() * 2, {"bias": g * 3}), "n": "of no use", "name": None}, None, 4

        fun = lambda tree, n, scale: tree["pair"][1](X) * tree["pair"][0] * scale
        f = rule_of(fun, lambda *args: (fun(*args), None), bwd)
        tree = {"pair": (jnp.float32(1.0), layer), "n": jnp.arange(2), "name": "no array"}

        def loss(number, layer, scale):
            return (f({**tree, "pair": (number, layer)}, jnp.arange(3), scale) * G).sum()

        for around in (lambda fun: fun, tether.jit):
            of_number, of_layer, of_scale = around(tether.grad(loss, argnums=(0, 1, 2)))(1.0, layer, 2.0)
            np.testing.assert_allclose([of_number, of_scale], [G.sum() * 2, 4.0])
            np.testing.assert_allclose(of_layer.bias, G * 3)
            assert not of_layer.weight.any()

    def test_tied_cells_and_a_module_that_is_two_arguments(self, layer):
        f = rule_of(
            lambda a, b, cell: a(X) + b(X) + cell,
            lambda a, b, cell: (a(X) + b(X) + cell.value, None),
            lambda _, g: ({"bias": g}, {"bias": 2 * g}, 4 * g),
        )
        bias = tether.cell(layer, "bias")
        of_layer = tether.grad(lambda layer: (f(layer, layer, bias) * G).sum())(layer)
        np.testing.assert_allclose(of_layer.bias, 7 * G)

    def test_float_dtypes_are_cast(self):
        x = jnp.ones(3, jnp.bfloat16)
        f = rule_of(lambda x: x, lambda x: (x, None), lambda _, g: (jnp.full(3, 2.0, jnp.float32),))
        assert tether.grad(lambda x: f(x).sum())(x).dtype == jnp.bfloat16

    def test_of_the_result(self, layer):
        """A result of arrays, integers and modules, made inside or not."""
        seen = []

        def fun(layer, x):
            return {"y": layer(x), "n": jnp.arange(2), "old": layer, "new": nn.Linear(2, 2, key=jax.random.key(1))}

        def bwd(x, g):
            seen.append((g["n"].dtype, g["old"], g["new"].weight.shape))
            return {"bias": g["y"] + g["new"].bias}, None

        f = rule_of(fun, lambda layer, x: (fun(layer, x), x), bwd)

        def loss(layer):
            out = f(layer, X)
            assert out["old"] is layer
            return (out["y"] * G).sum() + 3 * out["new"].bias.sum()

        np.testing.assert_allclose(tether.grad(loss)(layer).bias, G + 3)
        assert seen == [(jax.dtypes.float0, None, (2, 2))]


def _same(place):
    return lambda *args: (args[place], None)


class TestState:
    def test_bwd_finds_what_fwd_left(self):
        scale = tether.State(2.0)

        def fwd(x):
            before, scale.value = scale.value, 5.0
            return x * before, None

        f = rule_of(lambda x: fwd(x)[0], fwd, lambda _, g: (g * scale.value,))
        for around in (lambda fun: fun, tether.jit):
            scale.value = 2.0
            value, gradient = around(tether.value_and_grad(lambda x: f(x)))(3.0)
            scale.value = 11.0  # after the call, it is of no account
            assert (float(value), float(gradient)) == (6.0, 5.0)

    @pytest.mark.parametrize("around", [lambda fun: fun, tether.jit], ids=["eager", "jit"])
    def test_bwd_writes_and_draws_nothing(self, around):
        seen, dropout = tether.State(0), nn.Dropout(0.5)

        def write(_, g):
            seen.value = seen.value + 1
            return (g,)

        fwd = lambda x: (x * 2, None)
        f = rule_of(lambda x: x * 2, fwd, write)
        with pytest.raises(GradientError, match=r"(?s)bwd of <lambda> writes a Variable.*\(State\).*write it in fwd"):
            around(tether.grad(f))(3.0)
        f.defvjp(fwd, lambda _, g: (dropout(g),))
        with pytest.raises((GradientError, LeakError), match=r"(?s)tether\.random\.default.*(draw in|hand over)"):
            around(tether.grad(f))(3.0)
        assert int(seen.value) == 0 and float(f(3.0)) == 6.0

    def test_a_hidden_variable_in_bwd(self):
        class Shelf:  # discovery looks at no properties
            __slots__ = ("cells",)

            @property
            def cell(self):
                return self.cells()

        shelf, cell = Shelf(), tether.State(2.0)
        object.__setattr__(shelf, "cells", functools.partial({"cell": cell}.get, "cell"))
        f = rule_of(lambda x: x * 2, lambda x: (x * 2, None), lambda _, g: (g * shelf.cell.value,))
        with pytest.raises(LeakError, match=r"(?s)rule of <lambda> uses.*did not see.*State.*as an argument"):
            tether.grad(tether.jit(f))(3.0)

    def test_equal_models_share_a_program_and_not_their_values(self):
        """The rule that was traced with the first model runs on the values of the second."""

        class Net(tether.Module):
            def __init__(self, scale):
                self.scale, self.calls = tether.Param(scale), tether.State(0)

            @tether.custom_vjp
            def act(self, x):
                self.calls = self.calls + 1
                return self.scale * x

            def fwd(self, x):
                self.calls = self.calls + 1
                return self.scale * x, (self, x)

            def bwd(residuals, g):
                self, x = residuals
                return {"scale": 10 * g * x}, 10 * g * self.scale

            act.defvjp(fwd, bwd)

        step = tether.jit(lambda net, x: net.act(x))
        for scale in (2.0, 3.0, 4.0):
            net = Net(scale)
            of_net, of_x = tether.grad(step, argnums=(0, 1))(net, 7.0)
            assert (float(of_net.scale), float(of_x), int(net.calls)) == (70.0, 10 * scale, 1)
        assert step.traces == 1


class TestArguments:
    def test_nondiff_argnums(self, layer):
        @functools.partial(tether.custom_vjp, nondiff_argnums=("fun", 2))
        def apply(fun, x, power, factor):
            return fun(x) ** power * factor

        def bwd(fun, power, residuals, g):
            assert fun is layer and power == 3
            x, factor = residuals
            return (g * power * fun(x) ** (power - 1) * 10) @ fun.weight, None

        apply.defvjp(lambda fun, x, power, factor: (fun(x) ** power * factor, (x, factor)), bwd)
        y = np.asarray(layer(X))
        for around in (lambda fun: fun, tether.jit):
            gradient = around(tether.grad(lambda x: (apply(layer, x, 3, factor=1.0) * G).sum()))(X)
            np.testing.assert_allclose(gradient, (G * 30 * y**2) @ np.asarray(layer.weight), rtol=1e-5)
        with pytest.raises(GradientError, match=r"(?s)no argument.*weight"):
            tether.grad(lambda layer: apply(layer, X, 3, 1.0).sum())(layer)
        with pytest.raises(ArgumentError, match="nondiff_argnums"):
            rule_of(lambda x: x, _same(0), _same(0), nondiff_argnums=1)(1.0)

    def test_arrays_among_them_are_constants(self):
        f = rule_of(lambda x, y: x * y, lambda x, y: (x * y, None), lambda y, _, g: (g * y,), nondiff_argnums=(1,))
        for around in (lambda fun: fun, tether.jit):
            assert [float(a) for a in around(tether.grad(f, argnums=(0, 1)))(2.0, jnp.float32(3.0))] == [3.0, 0.0]
            assert float(tether.grad(around(f))(2.0, jnp.float32(3.0))) == 3.0

    def test_symbolic_zeros(self):
        seen = []

        def fwd(x, y):
            seen.append((x.perturbed, y.perturbed))
            return (x.value * y.value, x.value + y.value), y.value

        def bwd(y, g):
            seen.append(type(g[1]))
            return y * g[0], None

        f = tether.custom_vjp(lambda x, y: (x * y, x + y))
        f.defvjp(fwd, bwd, symbolic_zeros=True)
        assert float(tether.grad(lambda x: f(x, 3.0)[0])(2.0)) == 3.0
        assert seen == [(True, False), jax.custom_derivatives.SymbolicZero]

    def test_method_with_self_handed_through(self):
        class Clip(tether.Module):
            def __init__(self):
                self.limit, self.seen = tether.Constant(1.0), tether.State(0.0)

            @functools.partial(tether.custom_vjp, nondiff_argnums=(0,))
            def clip(self, x):
                self.seen = jnp.abs(x).max()
                return x

            clip.defvjp(
                lambda self, x: (self.clip(x), None),
                lambda self, _, g: (jnp.clip(g, -self.limit, self.limit),),
            )

            def __call__(self, x):
                return self.clip(x)

        clip = Clip()
        for around in (lambda fun: fun, tether.jit):
            gradient = around(tether.grad(lambda x: (clip(x) * jnp.array([0.5, 3.0, -7.0])).sum()))(X)
            np.testing.assert_allclose(gradient, [0.5, 1.0, -1.0])
        assert float(clip.seen) == 3.0


class TestErrors:
    @pytest.mark.parametrize(
        ("returned", "error", "said"),
        [
            (lambda g: g, StructureError, r"one cotangent for each argument.*layer, x.*got: +float32\[2\].*tuple of 2"),
            (lambda g: (None,), StructureError, r"one cotangent.*got: +tuple of 1.*expected: a tuple of 2"),
            (lambda g: (None, g), ShapeError, r"bwd of f.*another shape.*at: +x.*float32\[2\].*float32\[3\]"),
            (lambda g: ({"bias": X}, None), ShapeError, r"at: +layer\.bias.*float32\[3\].*float32\[2\]"),
            (lambda g: (g, None), StructureError, r"does not fit a module.*at: +layer +\(Linear\).*\{path: array\}"),
            (lambda g: ({"wait": g}, None), SelectionError, r"no cell of layer.*'wait'.*'weight'"),
            (
                lambda g: (nn.Linear(3, 2, use_bias=False, key=jax.random.key(1)), None),
                StructureError,
                r"does not fit a module",
            ),
            (lambda g: (None, "x"), DtypeError, r"another kind.*at: +x.*'x'.*float32\[3\]"),
            (lambda g: (None, X.astype(jnp.complex64)), DtypeError, r"another kind.*complex64\[3\].*float32\[3\]"),
            (lambda g: (None, (X,)), DtypeError, r"another kind.*at: +x.*tuple of 1"),
        ],
        ids=[
            "no tuple",
            "too few",
            "shape",
            "shape in module",
            "no module",
            "path",
            "other module",
            "text",
            "complex",
            "tree",
        ],
    )
    def test_what_bwd_returns(self, layer, returned, error, said):
        def f(layer, x):
            return layer(x)

        f = rule_of(f, lambda layer, x: (layer(x), None), lambda _, g: returned(g))
        with pytest.raises(error, match=f"(?s){said}"):
            gradients(f, layer, X)
        gradients(linear_with(lambda residuals, g: (None, None)), layer, X)

    def test_other_trees(self):
        f = rule_of(lambda t: t["a"] * 2, lambda t: (t["a"] * 2, None), lambda _, g: ({"b": g},))
        with pytest.raises(StructureError, match=r"(?s)another structure.*at: +t.*\{'b': \*\}.*\{'a': \*\}"):
            tether.grad(lambda x: f({"a": x}))(3.0)

    def test_what_fwd_returns(self):
        f = rule_of(lambda x: (x, x * 2), lambda x: x * 2, _same(0))
        with pytest.raises(StructureError, match=r"(?s)fwd of <lambda> must return a pair.*got: +6\.0.*residuals"):
            tether.grad(lambda x: f(x)[0])(3.0)
        f.defvjp(lambda x: ([x, x * 2], None), _same(0))
        with pytest.raises(StructureError, match=r"(?s)another structure than <lambda> itself.*\[\*, \*\].*\(\*, \*\)"):
            tether.grad(tether.jit(lambda x: f(x)[0]))(3.0)
        f.defvjp(lambda x: ((x, jnp.ones(2)), None), _same(0))
        with pytest.raises(ShapeError, match=r"(?s)another shape.*leaf 1.*float32\[2\].*float32\[\]"):
            tether.grad(tether.jit(lambda x: f(x)[0]))(3.0)

    def test_no_functions(self):
        with pytest.raises(ArgumentError, match="custom_vjp, bwd: what is transformed is no function"):
            tether.custom_vjp(jnp.sin).defvjp(jnp.sin, 3)
        with pytest.raises(TypeError, match="forward-mode"):  # JAX's word: there is none
            tether.jvp(linear_with(_same(0)), (nn.Linear(3, 2), X), (None, X))
