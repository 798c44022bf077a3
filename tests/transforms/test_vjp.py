# SPDX-License-Identifier: Apache-2.0
"""vjp, jvp and linearize: products with Jacobians, of modules and arrays, against plain JAX by hand."""

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
    SelectionError,
    ShapeError,
    StructureError,
)

X = np.array([[0.5, -1.0], [2.0, 1.5], [1.0, 3.0]], np.float32)
CT = np.array([1.0, -2.0, 0.5], np.float32)
W, DW, DX = jnp.array([0.3, -0.2]), jnp.array([1.0, 2.0]), np.full((3, 2), 0.5, np.float32)
FLOAT0 = jax.dtypes.float0


class Net(tether.Module):
    """y = sin(x @ w + b * w0): w trained, b a State that is read after it is written, n a counter."""

    def __init__(self):
        self.w = tether.Param(W)
        self.b = tether.State(0.5)
        self.n = tether.State(0)

    def __call__(self, x):
        self.n = self.n + 1
        self.b = self.b * self.w[0]
        return jnp.sin(x @ self.w + self.b)

    def state(self):
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self))
        return round(float(self.b), 6), int(self.n)


def by_hand(w, x=X, b=0.5):
    return jnp.sin(x @ w + b * w[0])


def by_vjp(fun, *primals, **options):
    """The derivative in the direction of ones by each function of the family: ``(result, number)``."""
    out, vjp_fn, *_ = tether.vjp(fun, *primals, **options)
    return out, sum(cotangent.sum() for cotangent in jax.tree.leaves(vjp_fn(jnp.ones_like(out))))


def by_jvp(fun, *primals, **options):
    out, tangent, *_ = tether.jvp(fun, primals, tuple(map(ones, primals)), **options)
    return out, tangent.sum()


def by_linearize(fun, *primals, **options):
    out, f_jvp, *_ = tether.linearize(fun, *primals, **options)
    return out, f_jvp(*map(ones, primals)).sum()


def ones(primal):
    return {"w": jnp.ones(2)} if isinstance(primal, Net) else jnp.ones_like(primal)


FAMILY = [by_vjp, by_jvp, by_linearize]


def derivative(w=None, x=None):
    """The right number: of the derivatives by w and x, those asked for."""
    _, (of_w, of_x) = right_vjp(jnp.ones(3))
    return (of_w.sum() if w else 0) + (of_x.sum() if x else 0)


def right_vjp(cotangent):
    y, vjp_fn = jax.vjp(by_hand, W, jnp.asarray(X))
    return y, vjp_fn(cotangent)


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


class TestVjp:
    def test_module_and_array(self):
        net = Net()
        y, vjp_fn = tether.vjp(lambda net, x: net(x), net, X)
        assert net.state() == (0.15, 1)
        right, (of_w, of_x) = right_vjp(CT)
        close(y, right)
        for scale in (1.0, 2.0):  # called twice
            of_net, of_array = vjp_fn(scale * CT)
            assert isinstance(of_net, Net) and of_net is not net
            assert of_net.b is None and of_net.n is None
            close(of_net.w, scale * of_w)
            close(of_array, scale * of_x)
        assert net.state() == (0.15, 1)

    def test_vjp_fn_under_other_transformations(self):
        net = Net()
        _, vjp_fn = tether.vjp(lambda net, x: net(x), net, X)
        rows = np.stack([right_vjp(row)[1][0] for row in jnp.eye(3)])
        for transformed in (jax.vmap, tether.vmap, lambda f: tether.jit(tether.vmap(f))):
            close(transformed(vjp_fn)(jnp.eye(3))[0].w, rows)
        close(jax.jit(vjp_fn)(CT)[0].w, right_vjp(CT)[1][0])
        close(tether.grad(lambda ct: (vjp_fn(ct)[0].w ** 2).sum())(CT), 2 * rows @ right_vjp(CT)[1][0])
        close(tether.jit(lambda net: tether.vjp(lambda net: net(X), net)[1])(Net())(CT)[0].w, right_vjp(CT)[1][0])
        assert net.state() == (0.15, 1)

    def test_pytrees_of_results_and_primals(self):
        net = Net()
        fun = lambda tree: {"y": tree["nets"][0](tree["x"]), "x": 2 * tree["x"]}
        _, vjp_fn = tether.vjp(fun, {"nets": [net], "x": jnp.asarray(X)})
        (tree,) = vjp_fn({"y": CT, "x": None})
        close(tree["nets"][0].w, right_vjp(CT)[1][0])
        close(tree["x"], right_vjp(CT)[1][1])
        (tree,) = vjp_fn({"y": None, "x": DX})
        close(tree["x"], 2 * DX)
        close(tree["nets"][0].w, [0, 0])

    def test_same_model_twice_gets_the_total(self):
        net = Net()
        _, vjp_fn = tether.vjp(lambda a, b: (a.w * b.w).sum() + net.w.sum(), net, net)
        for cotangent in vjp_fn(1.0):
            close(cotangent.w, 2 * W + 1)

    def test_tied_weight_has_one_cotangent_and_one_tangent(self):
        tied = Tied()
        fun = lambda tied: (jnp.ones((1, 2)) @ tied.a.weight @ tied.b.weight).sum()
        (cotangent,) = tether.jit(lambda tied: tether.vjp(fun, tied)[1](1.0))(tied)
        np.testing.assert_array_equal(cotangent.a.weight, [[7.0, 11.0], [9.0, 13.0]])
        np.testing.assert_array_equal(cotangent.b.weight, [[7.0, 11.0], [9.0, 13.0]])
        assert len(jax.tree.leaves(cotangent)) == 1
        direction = jnp.array([[1.0, 0.0], [0.0, 2.0]])
        for tangent in ({"a.weight": direction}, {"b.weight": direction}, jax.tree.map(lambda _: direction, tied)):
            assert float(tether.jvp(fun, (tied,), (tangent,))[1]) == 7 + 26
        with pytest.raises(StructureError, match="twice for one cell") as caught:
            tether.jvp(fun, (tied,), ({"a.weight": direction, "b.weight": 2 * direction},))
        assert caught.value.at == "tied.b.weight"

    def test_wrt_selects_and_frozen_params_are_passed_by(self):
        net = Net()
        (cotangent,) = tether.vjp(lambda net: net(X), net, wrt=tether.State)[1](CT)
        assert cotangent.w is None and cotangent.n is None
        close(cotangent.b, jax.vjp(lambda b: by_hand(W, b=b), 0.5)[1](CT)[0])
        _, tangent = tether.jvp(lambda net: net(X), (Net(),), ({"b": 2.0},), wrt="b")
        close(tangent, 2 * 0.3 * np.cos(X @ np.asarray(W) + 0.15))
        assert jax.tree.leaves(tether.vjp(lambda net: net(X), tether.freeze(net))[1](CT)) == []

    def test_variables_are_primals_too(self):
        scale, count = tether.Param(3.0), tether.State(2)
        of_scale, of_count = tether.vjp(lambda s, n: s.value**2, scale, count)[1](1.0)
        assert (float(of_scale), of_count.dtype) == (6.0, FLOAT0)
        assert float(tether.jvp(lambda s, n: s.value**2, (scale, count), (2.0, None))[1]) == 12.0

    @pytest.mark.parametrize("flag", [True, False])
    def test_what_has_no_float_is_handed_through(self, flag):
        def f(x, n, flag, mode, apply):
            assert mode == "times" and flag is given and isinstance(n, int)
            return apply(x) * n if flag else x

        given, primals = flag, (2.0, 3, flag, "times", jnp.sin)
        right = 3 * np.cos(2.0) if flag else 1.0
        of_x, of_n, of_flag, of_mode, of_apply = tether.vjp(f, *primals)[1](1.0)
        close(of_x, right)
        assert (of_n.dtype, of_n.shape, of_flag.dtype, of_mode, of_apply) == (FLOAT0, (), FLOAT0, None, None)
        for zero in (None, np.zeros((), FLOAT0)):
            close(tether.jvp(f, primals, (1.0, zero, zero, None, None))[1], right)
            close(tether.linearize(f, *primals)[1](1.0, zero, zero, None, None), right)

    def test_integer_arrays_and_keys(self):
        f = lambda x, labels, key: (x[labels] * jax.random.normal(key), labels + 1)
        primals = jnp.arange(3.0), jnp.array([0, 2]), jax.random.key(0)
        noise = float(jax.random.normal(jax.random.key(0)))
        (y, n), vjp_fn = tether.vjp(f, *primals)
        assert n.tolist() == [1, 3]
        for of_labels in (None, jnp.ones(2, int), np.zeros(2, FLOAT0)):  # as in JAX, what is given there counts nothing
            of_x, *others = vjp_fn((jnp.ones(2), of_labels))
            close(of_x, [noise, 0, noise])
            assert [(part.dtype, part.shape) for part in others] == [(FLOAT0, (2,)), (FLOAT0, ())]
        _, (dy, dn) = tether.jvp(f, primals, (jnp.ones(3), None, None))
        close(dy, [noise, noise])
        assert (dn.dtype, dn.shape) == (FLOAT0, (2,))

    def test_without_primals_or_results(self):
        assert tether.vjp(lambda: 2.0)[1](1.0) == ()
        assert tether.vjp(lambda x: None, 3.0)[1](None) == (0.0,)


class Tied(tether.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(2, 2, use_bias=False), nn.Linear(2, 2, use_bias=False)
        self.b.weight = tether.cell(self.a, "weight")
        self.a.weight = jnp.array([[1.0, 2.0], [3.0, 4.0]])


class TestJvp:
    @pytest.mark.parametrize(
        "tangent_of_net",
        [
            lambda net: {"w": DW},
            lambda net: {"w": DW, "b": None},
            lambda net: jax.tree.map(lambda _: DW, tether.filter(net, tether.Param)),
            lambda net: tether.grad(lambda net: (net.w * DW).sum())(net),
        ],
        ids=["path", "path-none", "filtered", "gradient"],
    )
    @pytest.mark.parametrize("as_tuple", [tuple, list])
    def test_module_and_array(self, tangent_of_net, as_tuple):
        net = Net()
        direction = tangent_of_net(net)
        y, tangent = tether.jvp(lambda net, x: net(x), as_tuple([net, X]), as_tuple([direction, DX]))
        right, right_tangent = jax.jvp(by_hand, (W, jnp.asarray(X)), (DW, jnp.asarray(DX)))
        close(y, right)
        close(tangent, right_tangent)
        assert net.state() == (0.15, 1)
        y, f_jvp = tether.linearize(lambda net, x: net(x), Net(), X)
        close(y, right)
        close(f_jvp(direction, DX), right_tangent)
        close(f_jvp(direction, None), jax.jvp(by_hand, (W,), (DW,))[1])
        close(f_jvp(None, DX), jax.jvp(lambda x: by_hand(W, x), (jnp.asarray(X),), (jnp.asarray(DX),))[1])

    def test_tangents_under_other_transformations(self):
        net, right = Net(), jax.vmap(lambda d: jax.jvp(by_hand, (W,), (d,))[1])(jnp.eye(2))
        _, f_jvp = tether.linearize(lambda net: net(X), net)
        close(jax.vmap(lambda d: f_jvp({"w": d}))(jnp.eye(2)), right)
        close(tether.jit(tether.vmap(f_jvp))({"w": jnp.eye(2)}), right)
        assert net.state() == (0.15, 1)
        new = lambda: tether.jit(lambda net: tether.linearize(lambda net: net(X), net)[1])(Net())
        close(new()({"w": DW}), jax.jvp(by_hand, (W,), (DW,))[1])

    def test_pytrees(self):
        fun = lambda tree: {"y": tree["net"](tree["x"][0])}
        _, tangent = tether.jvp(fun, ({"net": Net(), "x": [jnp.asarray(X)]},), ({"net": {"w": DW}, "x": [None]},))
        close(tangent["y"], jax.jvp(by_hand, (W,), (DW,))[1])

    def test_the_same_cell_in_two_primals(self):
        net = Net()
        f = lambda a, b: (a.w * b.w).sum()
        for tangents in (({"w": DW}, None), (None, {"w": DW}), ({"w": DW}, {"w": DW})):
            close(tether.jvp(f, (net, net), tangents)[1], 2 * (W * DW).sum())
        with pytest.raises(StructureError, match="twice"):
            tether.jvp(f, (net, net), ({"w": DW}, {"w": 2 * DW}))


class TestAux:
    @pytest.mark.parametrize("by", [tether.vjp, tether.linearize, lambda f, x, **k: tether.jvp(f, (x,), (x,), **k)])
    def test_anything(self, by):
        net = Net()
        aux_fun = lambda x: (net(x), {"n": net.n, "net": net, "text": "text", "none": None, "y": 2 * x, "new": Net()})
        y, _, aux = by(aux_fun, jnp.asarray(X), has_aux=True)
        close(y, by_hand(W))
        close(aux["y"], 2 * X)
        assert aux["net"] is net and net.state() == (0.15, 1)
        assert (int(aux["n"]), aux["text"], aux["none"]) == (1, "text", None)
        assert aux["new"].state() == (0.5, 0)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(aux))
        with pytest.raises(GradientError, match="must return a pair"):
            by(lambda x: x, 2.0, has_aux=True)


class TestState:
    """The model may be come by in any way; it is written once, and holds no tracer."""

    @pytest.mark.parametrize("by", FAMILY)
    def test_ways_to_come_by_a_model(self, by):
        ways = [
            (lambda net: lambda x: net(x), ()),
            (lambda net: net, ()),
            (lambda net: net.__call__, ()),
            (lambda net: functools.partial(lambda net, x: net(x), net), ()),
        ]
        for way, _ in ways:
            net = Net()
            for call in (1, 2):
                by(way(net), X)
                assert net.state() == (round(0.5 * 0.3**call, 6), call)
        net = Net()
        y, number = by(lambda net, x: net(x), net, X)
        close(y, by_hand(W))
        close(number, derivative(w=True, x=True))
        assert net.state() == (0.15, 1)

    @pytest.mark.parametrize("by", FAMILY)
    def test_in_jit_grad_and_vmap(self, by):
        net = Net()
        step = tether.jit(lambda net, x: by(lambda net, x: net(x), net, x)[1])
        close(step(net, X), derivative(w=True, x=True))
        step(net, X)
        assert step.traces == 1 and net.state() == (0.045, 2)

        one, two = Net(), Net()
        of_w = lambda net: tether.grad(lambda net: by(lambda net: net(X), net)[1])(net).w
        of_x = lambda x: tether.vmap(lambda x: by(lambda x: two(x), x)[1])(x)
        found = tether.jit(lambda net, x: (of_w(net), of_x(x)))(one, X[:, None])
        w_by_hand = jax.grad(lambda w: jax.grad(lambda w: by_hand(w).sum())(w).sum())
        x_by_hand = jax.vmap(lambda x: jax.grad(lambda x: by_hand(W, x).sum())(x).sum())
        jax.tree.map(close, found, jax.jit(lambda x: (w_by_hand(W), x_by_hand(x)))(X[:, None]))
        assert one.state() == two.state() == (0.15, 1)

    @pytest.mark.parametrize("by", FAMILY)
    def test_nothing_leaks_and_a_failure_writes_nothing(self, by):
        net, stopping = Net(), [True]

        def f(x):
            y = net(x)
            if stopping:
                raise ValueError("stop")
            return y

        for call in (lambda: by(f, X), lambda: tether.jit(by, static_argnums=0)(f, X)):
            with pytest.raises(ValueError, match="stop"):
                call()
            assert net.state() == (0.5, 0)
        stopping.clear()
        right = derivative(x=True)
        with jax.checking_leaks():
            close(tether.jit(by, static_argnums=0)(f, X)[1], right)
        assert net.state() == (0.15, 1)

    @pytest.mark.parametrize("by", FAMILY)
    def test_dropout_and_batchnorm_move_once(self, by):
        model, stream = Noisy(), tether.pure(tether.random.draw).values()["tether.random.default"]
        y, number = by(lambda x: model(x), X)
        right, after = jax.jit(noisy_by_hand)(jnp.ones(2), X, stream)
        close(y, right)
        total = lambda x: noisy_by_hand(jnp.ones(2), x, stream)[0].sum()
        np.testing.assert_allclose(number, jax.jit(jax.grad(total))(X).sum(), rtol=1e-4, atol=1e-4)
        check_noisy(model, after)


class Noisy(tether.Module):
    """Dropout, then BatchNorm, then a weighted sum of the channels."""

    def __init__(self):
        self.scale = tether.Param(jnp.ones(2))
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm(2)

    def __call__(self, x):
        return (self.norm(self.drop(x * self.scale[None])) ** 3 * jnp.array([[1.0, 2.0]])).sum(1)


def noisy_by_hand(scale, x, stream):
    """The result, and mean, variance and random stream after one call."""
    after, drawn = jax.random.split(stream)
    h = jnp.where(jax.random.bernoulli(drawn, 0.5, x.shape), x * scale[None] / 0.5, 0.0)
    mean, var = h.mean(0), h.var(0)
    y = ((h - mean[None]) / jnp.sqrt(var + 1e-5)[None]) ** 3 * jnp.array([[1.0, 2.0]])
    return y.sum(1), (0.1 * mean, 0.9 + 0.1 * var, after)


def check_noisy(model, after):
    mean, var, stream = after
    close(model.norm.mean, mean)
    close(model.norm.var, var)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))
    now = tether.pure(tether.random.draw).values()["tether.random.default"]
    np.testing.assert_array_equal(jax.random.key_data(now), jax.random.key_data(stream))


class TestNested:
    def test_hessian_vector_product_by_jvp_of_grad(self):
        net = Net()
        gradient, product = tether.jvp(tether.grad(lambda net: (net(X) ** 2).sum()), (net,), ({"w": DW},))
        loss = lambda w: (by_hand(w) ** 2).sum()
        right, right_product = jax.jvp(jax.grad(loss), (W,), (DW,))
        close(gradient.w, right)
        close(product.w, right_product)
        assert product.b is None and net.state() == (0.15, 1)

    def test_grad_of_jvp_and_vjp_of_jvp(self):
        net = Net()
        inner = lambda net: tether.jvp(lambda net: net(X), (net,), ({"w": DW},))[1]
        inner_by_hand = lambda w: jax.jvp(by_hand, (w,), (DW,))[1]
        close(tether.grad(lambda net: inner(net).sum())(net).w, jax.grad(lambda w: inner_by_hand(w).sum())(W))
        close(tether.vjp(inner, Net())[1](CT)[0].w, jax.vjp(inner_by_hand, W)[1](CT)[0])
        assert net.state() == (0.15, 1)

    def test_gradient_with_respect_to_a_tangent(self):
        net = Net()
        found = tether.grad(lambda d: tether.jvp(lambda net: net(X), (net,), ({"w": d},))[1].sum())(DW)
        close(found, derivative_of_w())

    def test_new_module_as_result(self):
        f = lambda x: jax.tree.map(lambda w: w * x, nn.Linear(2, 1, key=jax.random.key(0)))
        made = nn.Linear(2, 1, key=jax.random.key(0))
        out, tangent = tether.jvp(f, (3.0,), (2.0,))
        close(out.weight, 3 * made.weight)
        close(tangent.weight, 2 * made.weight)
        assert float(tether.vjp(f, 3.0)[1](made)[0]) == pytest.approx(
            sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(made)), rel=1e-5
        )


def derivative_of_w():
    return jax.grad(lambda w: by_hand(w).sum())(W)


TANGENT_FAULTS = {
    "number": (ArgumentError, None, lambda net: ((net, X), ({"w": DW},))),
    "no tuple": (ArgumentError, "f", lambda net: (net, {"w": DW})),
    "path": (SelectionError, None, lambda net: ((net, X), ({"u": DW}, None))),
    "shape": (ShapeError, "net.w", lambda net: ((net, X), ({"w": jnp.ones(3)}, None))),
    "shape of an array": (ShapeError, "x", lambda net: ((net, X), (None, DX[0]))),
    "dtype": (DtypeError, "net.w", lambda net: ((net, X), ({"w": DW.astype(jnp.bfloat16)}, None))),
    "no array": (DtypeError, "net.w", lambda net: ((net, X), ({"w": "text"}, None))),
    "form": (StructureError, "net", lambda net: ((net, X), (3.0, None))),
    "other module": (StructureError, "net", lambda net: ((net, X), (nn.Linear(2, 1), None))),
    "cell that is not differentiated": (GradientError, "net.b", lambda net: ((net, X), ({"b": 1.0}, None))),
    "integer": (GradientError, "x", lambda net: ((net, np.arange(2)), (None, np.arange(2)))),
    "structure": (StructureError, "x['b']", lambda net: ((net, {"a": X, "b": X}), (None, {"a": X}))),
    "deeper": (StructureError, "x[0][1]", lambda net: ((net, [[X]]), (None, [[X, X]]))),
}


class TestErrors:
    @pytest.mark.parametrize("name", TANGENT_FAULTS)
    def test_tangent(self, name):
        error, at, make = TANGENT_FAULTS[name]
        net = Net()
        primals, tangents = make(net)

        def f(net, x):
            return net(X)

        with pytest.raises(error, match="^jvp: ") as caught:
            tether.jvp(f, primals, tangents)
        assert caught.value.at == at and caught.value.fixes
        assert net.state() == (0.5, 0)
        if isinstance(primals, tuple):
            _, f_jvp = tether.linearize(f, *primals)
            with pytest.raises(error, match="^linearize: "):
                f_jvp(*tangents)

    @pytest.mark.parametrize(
        ("cotangent", "error", "at"),
        [
            ({"y": CT}, StructureError, "result['z']"),
            (CT, StructureError, "result"),
            ({"y": CT[:2], "z": None}, ShapeError, "result['y']"),
            ({"y": CT.astype(np.float16), "z": None}, DtypeError, "result['y']"),
            ({"y": "text", "z": None}, DtypeError, "result['y']"),
        ],
        ids=["missing", "array", "shape", "dtype", "no-array"],
    )
    def test_cotangent(self, cotangent, error, at):
        _, vjp_fn = tether.vjp(lambda x: {"y": by_hand(W, x), "z": x}, X)
        with pytest.raises(error, match="^vjp: a cotangent") as caught:
            vjp_fn(cotangent)
        assert caught.value.at == at and caught.value.fixes

    @pytest.mark.parametrize("by", FAMILY)
    def test_results(self, by):
        net, results = Net(), []

        def f(x):
            return net(x), results[-1]()

        old = "a module that existed before"
        for result, words in (
            (lambda: net, old),
            (lambda: net.eval(), old),
            (lambda: "text", "no array"),
            (lambda: tether.cell(net, "w"), "no array"),
        ):
            results.append(result)
            with pytest.raises(GradientError, match=words) as caught:
                by(f, X)
            assert caught.value.at == "f, result[1]"
            assert net.state() == (0.5, 0)

    @pytest.mark.parametrize("call", [tether.vjp, tether.linearize, lambda f, x: tether.jvp(f, (x,), (x,))])
    def test_no_function(self, call):
        with pytest.raises(ArgumentError, match="no function"):
            call(3, 1.0)

    def test_unknown_selection(self):
        with pytest.raises(SelectionError, match="'v'"):
            tether.vjp(lambda net: net(X), Net(), wrt="v")
