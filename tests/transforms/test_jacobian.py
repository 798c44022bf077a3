# SPDX-License-Identifier: Apache-2.0
"""jacfwd, jacrev and hessian: argument numbers, modules, State, against plain JAX by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, GradientError, SelectionError

X = np.array([[0.5, -1.0], [2.0, 1.5], [1.0, 3.0]], np.float32)
W, V = jnp.array([0.3, -0.2]), jnp.array([1.0, -1.0, 0.5])
FORWARD_AND_BACK = [tether.jacfwd, tether.jacrev]
FAMILY = [*FORWARD_AND_BACK, tether.hessian]
FORWARD_AND_TWICE = [tether.jacfwd, tether.hessian]  # the hessian goes forward and back


class Net(tether.Module):
    """y = v * sin(x @ w + b * w0): w and v trained, b a State that is read after it is written, n a counter."""

    def __init__(self):
        self.w, self.v = tether.Param(W), tether.Param(V)
        self.b, self.n = tether.State(0.5), tether.State(0)

    def __call__(self, x):
        self.n = self.n + 1
        self.b = self.b * self.w[0]
        return self.v * jnp.sin(x @ self.w + self.b)

    def state(self):
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self))
        return round(float(self.b), 6), int(self.n)


def by_hand(params, x=X):
    return params["v"] * jnp.sin(x @ params["w"] + 0.5 * params["w"][0])


PARAMS = {"w": W, "v": V}


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


def oracle(transform, fun, *args, **options):
    """What JAX's transformation of the same name gives for a function written by hand."""
    return jax.jit(getattr(jax, transform.__name__)(fun, **options))(*args)


def sum_by_hand(params, x=X):
    return by_hand(params, x).sum()


def loss_by_hand(params, x=X):
    return (by_hand(params, x) ** 2).sum()


def check_blocks(found, right, ndim=1):
    """Module-shaped results, nested as often as ``ndim`` says, against dicts of dicts."""
    assert isinstance(found, Net) and found.b is None and found.n is None
    for name, desired in right.items():
        part = getattr(found, name)
        check_blocks(part, desired, ndim - 1) if ndim > 1 else close(part, desired)


class TestArgnums:
    """x**2 * y + y * z at (2, 3, 5): the numbers mean the user's signature, in all forms."""

    args = (jnp.float32(2), jnp.float32(3), jnp.float32(5))
    first = (12.0, 9.0, 3.0)
    second = ((6.0, 4.0, 0.0), (4.0, 0.0, 1.0), (0.0, 1.0, 0.0))

    @pytest.mark.parametrize(
        ("argnums", "indices"),
        [
            *[(None, 0), (0, 0), (1, 1), (-1, 2), ("y", 1)],
            *[((0,), (0,)), ([1, -1], (1, 2)), (("z", 0), (2, 0))],
        ],
    )
    @pytest.mark.parametrize("transform", FAMILY)
    def test_mean_the_users_arguments(self, transform, argnums, indices):
        found = transform(lambda x, y, z: x**2 * y + y * z, argnums=argnums)(*self.args)
        if transform is tether.hessian:
            pick = lambda i: tuple(self.second[i][j] for j in indices)
            right = tuple(map(pick, indices)) if isinstance(indices, tuple) else self.second[indices][indices]
        else:
            right = tuple(self.first[i] for i in indices) if isinstance(indices, tuple) else self.first[indices]
        assert jax.tree.map(float, found) == right

    @pytest.mark.parametrize("argnums", [3, -4, (0, 7), True, "w", 1.5, (0, 0), (0, -3)])
    @pytest.mark.parametrize("transform", FAMILY)
    def test_wrong_ones_print_the_signature(self, transform, argnums):
        def energy(x, y, z):
            return x * y * z

        with pytest.raises(ArgumentError, match=r"energy\(x, y, z\)"):
            transform(energy, argnums=argnums)(*self.args)

    @pytest.mark.parametrize("transform", FORWARD_AND_BACK)
    def test_self_is_not_counted_and_flags_pass_through(self, transform):
        class Model(tether.Module):
            def __init__(self):
                self.w = tether.Param(2.0)

            def loss(self, x, flag, *, mode="double"):
                return self.w * x**2 if flag and mode == "double" else x

        loss = Model().loss
        assert float(transform(loss)(3.0, True)) == 12.0
        assert float(transform(loss, argnums=-2)(3.0, False)) == 1.0
        assert float(transform(argnums="x")(loss)(3.0, True, mode="single")) == 1.0
        with pytest.raises(ArgumentError, match=r"loss\(x, flag"):
            transform(loss, argnums=2)(3.0, True)
        with pytest.raises(GradientError, match="no float"):
            transform(loss, argnums=1)(3.0, True)


class TestModules:
    @pytest.mark.parametrize("transform", FORWARD_AND_BACK)
    def test_one_jacobian_for_each_result(self, transform):
        net = Net()
        fun = lambda net, x: {"y": net(x), "z": [x[0]]}
        found = tether.jit(transform(fun, argnums=(0, "x")))(net, jnp.asarray(X))
        fun_by_hand = lambda params, x: {"y": by_hand(params, x), "z": [x[0]]}
        right = oracle(transform, fun_by_hand, PARAMS, X, argnums=(0, 1))
        for block, desired in ((found["y"], right["y"]), (found["z"][0], right["z"][0])):
            assert isinstance(block, tuple)
            check_blocks(block[0], desired[0])
            close(block[1], desired[1])
        assert found["y"][0].w.shape == (3, 2) and found["y"][1].shape == (3, 3, 2)
        assert net.state() == (0.15, 1)

    def test_hessian_holds_modules_in_a_module(self):
        net = Net()
        loss = lambda net: (net(X) ** 2).sum()
        found = tether.jit(tether.hessian(loss))(net)
        right = oracle(tether.hessian, loss_by_hand, PARAMS)
        check_blocks(found, right, 2)
        assert found.w.v.shape == (2, 3)
        assert net.state() == (0.15, 1)
        doubled = jax.tree.map(lambda block: 2 * block, found)  # it is a pytree like any other
        close(doubled.v.w, 2 * right["v"]["w"])

    def test_hessian_of_several_arguments_and_results(self):
        net = Net()
        found = tether.jit(tether.hessian(lambda net, x: {"y": net(x)[:2]}, argnums=(1, 0)))(net, jnp.asarray(X))
        fun_by_hand = lambda params, x: {"y": by_hand(params, x)[:2]}
        right = oracle(tether.hessian, fun_by_hand, PARAMS, X, argnums=(1, 0))
        close(found["y"][0][0], right["y"][0][0])
        check_blocks(found["y"][0][1], right["y"][0][1])
        assert isinstance(found["y"][1].w, tuple)
        close(found["y"][1].w[0], right["y"][1]["w"][0])
        check_blocks(found["y"][1].w[1], right["y"][1]["w"][1])

    def test_nested_by_hand_is_the_hessian(self):
        right = oracle(tether.hessian, loss_by_hand, PARAMS)
        loss = lambda net: (net(X) ** 2).sum()
        for nested in (
            tether.jacfwd(tether.jacrev(loss)),
            tether.jacrev(tether.jacfwd(loss)),
            tether.jacfwd(tether.grad(loss)),
        ):
            net = Net()
            check_blocks(tether.jit(nested)(net), right, 2)
            assert net.state() == (0.15, 1)

    def test_tied_weight_is_one(self):
        class Tied(tether.Module):
            def __init__(self):
                self.a, self.b = nn.Linear(2, 2, use_bias=False), nn.Linear(2, 2, use_bias=False)
                self.b.weight = tether.cell(self.a, "weight")
                self.a.weight = jnp.array([[1.0, 2.0], [3.0, 4.0]])

        fun = lambda tied: (jnp.ones((1, 2)) @ tied.a.weight @ tied.b.weight).sum()
        for transform in FORWARD_AND_BACK:
            found = tether.jit(transform(fun))(Tied())
            np.testing.assert_array_equal(found.a.weight, [[7.0, 11.0], [9.0, 13.0]])
            np.testing.assert_array_equal(found.b.weight, found.a.weight)
            assert len(jax.tree.leaves(found)) == 1
        found = tether.jit(tether.hessian(fun))(Tied())
        (block,) = jax.tree.leaves(found)
        right = oracle(tether.hessian, lambda k: (jnp.ones((1, 2)) @ k @ k).sum(), jnp.eye(2))
        np.testing.assert_array_equal(block, right)
        np.testing.assert_array_equal(found.b.weight.a.weight, right)

    @pytest.mark.parametrize("transform", FORWARD_AND_TWICE)
    def test_wrt_what_is_closed_over(self, transform):
        order, net, other = (2 if transform is tether.hessian else 1), Net(), tether.Param(2.0)
        fun = lambda x: other.value * net(x).sum()
        nested = {"net": {"w": W, "v": V}, "rest": [jnp.float32(2)]}
        right = oracle(transform, lambda tree: tree["rest"][0] * sum_by_hand(tree["net"]), nested)
        found = tether.jit(transform(fun, wrt={"net": net, "rest": [other]}))(X)
        if order == 1:
            check_blocks(found["net"], right["net"])
            close(found["rest"][0], right["rest"][0])
        else:
            check_blocks(found["rest"][0]["net"], right["rest"][0]["net"])
            close(found["net"].w["rest"][0], right["net"]["w"]["rest"][0])
        assert net.state() == (0.15, 1)
        with pytest.raises(ArgumentError, match="argnums"):
            transform(fun, argnums=0, wrt=net)

    @pytest.mark.parametrize("transform", FAMILY)
    def test_wrt_selects(self, transform):
        fun = lambda net: net.w.sum() * net.v.sum() ** 2 * net.b**2
        found = tether.jit(transform(fun, wrt=["v", tether.State]))(Net())
        assert found.w is None and found.n is None
        if transform is tether.hessian:
            close(found.v.b, [0.1] * 3)  # 2 * 0.1 * 0.5 * 2 * b
            close(found.b.v, found.v.b)
            assert found.b.w is None
        else:
            close(found.v, [0.025] * 3)
            close(found.b, 0.025)
        with pytest.raises(SelectionError, match="'u'"):
            transform(lambda net: net(X), wrt="u")(Net())


class TestState:
    @pytest.mark.parametrize("transform", FORWARD_AND_TWICE)
    def test_dropout_and_batchnorm_move_as_in_one_call(self, transform):
        class Noisy(tether.Module):
            def __init__(self):
                self.scale = tether.Param(jnp.ones(2))
                self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm(2)

            def __call__(self, x):
                return (self.norm(self.drop(x * self.scale[None])) ** 3).sum(1)

        def noisy_by_hand(scale, stream):
            after, drawn = jax.random.split(stream)
            h = jnp.where(jax.random.bernoulli(drawn, 0.5, X.shape), X * scale[None] / 0.5, 0.0)
            y = (((h - h.mean(0)[None]) / jnp.sqrt(h.var(0) + 1e-5)[None]) ** 3).sum(1)
            return y, (0.1 * h.mean(0), 0.9 + 0.1 * h.var(0), after)

        stream = lambda: tether.pure(tether.random.draw).values()["tether.random.default"]
        model, before = Noisy(), stream()
        wrap = (lambda f: f) if transform is tether.jacfwd else tether.jit
        found = wrap(transform(lambda model: model(X), wrt="scale"))(model)
        right, (mean, var, after) = oracle(transform, noisy_by_hand, jnp.ones(2), before, has_aux=True)
        block = found.scale.scale if transform is tether.hessian else found.scale
        np.testing.assert_allclose(block, right, rtol=1e-3, atol=1e-3)
        close(model.norm.mean, mean)
        close(model.norm.var, var)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))
        np.testing.assert_array_equal(jax.random.key_data(stream()), jax.random.key_data(after))

    @pytest.mark.parametrize("transform", FAMILY)
    def test_ways_to_come_by_a_model(self, transform):
        x, right = X[0], oracle(transform, functools.partial(sum_by_hand, PARAMS), X[0])
        for way in (
            lambda net: functools.partial(lambda net, x: net(x).sum(), net),
            lambda net: Sum(net),
            lambda net: Sum(net).__call__,
        ):
            net = Net()
            close(transform(way(net))(x), right)
            assert net.state() == (0.15, 1)
            transform(way(net))(x)
            assert net.state() == (0.045, 2)

    @pytest.mark.parametrize("transform", FORWARD_AND_TWICE)
    def test_in_jit_grad_and_vmap(self, transform):
        right = oracle(transform, sum_by_hand, PARAMS)
        order, net = 2 if transform is tether.hessian else 1, Net()
        step = tether.jit(transform(lambda net: net(X).sum()))
        check_blocks(step(net), right, order)
        step(net)
        assert step.traces == 1 and net.state() == (0.045, 2)

        one, two = Net(), Net()
        of_x = lambda net: lambda x: (transform(lambda x: net(x).sum())(x) ** 2).sum()
        derivative = getattr(jax, transform.__name__)(functools.partial(sum_by_hand, PARAMS))
        of_x_by_hand = lambda x: (derivative(x) ** 2).sum()
        found = tether.jit(lambda x: (tether.grad(of_x(one))(x[0]), tether.vmap(of_x(two))(x)))(X)
        right = jax.jit(lambda x: (jax.grad(of_x_by_hand)(x[0]), jax.vmap(of_x_by_hand)(x)))(X)
        jax.tree.map(close, found, right)
        assert one.state() == two.state() == (0.15, 1)

    @pytest.mark.parametrize("transform", FAMILY)
    def test_nothing_leaks_and_a_failure_writes_nothing(self, transform):
        net, stopping = Net(), [True]

        def f(x):
            y = net(x).sum()
            if stopping:
                raise ValueError("stop")
            return y

        for call in (transform(f), tether.jit(transform(f))):
            with pytest.raises(ValueError, match="stop"):
                call(X[0])
            assert net.state() == (0.5, 0)
        stopping.clear()
        right = oracle(transform, functools.partial(sum_by_hand, PARAMS), X[0])
        with jax.checking_leaks():
            close(tether.jit(transform(f))(X[0]), right)
        assert net.state() == (0.15, 1)


class Sum(tether.Module):
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x).sum()


class TestAux:
    @pytest.mark.parametrize("transform", FAMILY)
    def test_anything(self, transform):
        net = Net()
        fun = lambda x: (net(x).sum(), {"net": net, "n": net.n, "text": "text", "x": 2 * x, "number": 3, "new": Net()})
        found, aux = transform(fun, has_aux=True)(X[0])
        close(found, oracle(transform, functools.partial(sum_by_hand, PARAMS), X[0]))
        assert aux["net"] is net and (int(aux["n"]), aux["text"], aux["number"]) == (1, "text", 3)
        close(aux["x"], 2 * X[0])
        assert aux["new"].state() == (0.5, 0) and net.state() == (0.15, 1)
        assert not isinstance(aux["x"], jax.core.Tracer)
        with pytest.raises(GradientError, match=f"{transform.__name__}: with has_aux"):
            transform(lambda x: x, has_aux=True)(1.0)


class TestErrors:
    @pytest.mark.parametrize("transform", FAMILY)
    def test_nothing_to_differentiate(self, transform):
        for arg in (3, np.arange(3), True, "text", jax.random.key(0)):
            with pytest.raises(GradientError, match=f"{transform.__name__}: an argument has no float"):
                transform(lambda x: 1.0)(arg)
        with pytest.raises(GradientError, match="no float to differentiate"):
            transform(lambda net: net(X))(tether.freeze(Net()))
        with pytest.raises(ArgumentError, match="no function"):
            transform(3)

    @pytest.mark.parametrize("transform", FAMILY)
    def test_results(self, transform):
        net, results = Net(), []

        def f(x):
            return {"y": net(x), "other": results[-1]}

        for result, words in (
            (net, "a module that existed before"),
            ("text", "no array"),
            (3, "wrong dtype"),
            (jnp.arange(2), "wrong dtype"),
        ):
            results.append(result)
            with pytest.raises(GradientError, match=words) as caught:
                transform(f)(X)
            assert caught.value.at == "f, result['other']" and caught.value.fixes
        with pytest.raises(GradientError, match="returns no array"):
            transform(lambda x: (net(x), None)[1])(X)
        assert net.state() == (0.5, 0)

    def test_complex_and_integers(self):
        cube = lambda z: z**3
        assert complex(tether.jacfwd(cube, holomorphic=True)(2j)) == -12
        assert complex(tether.jacrev(cube, holomorphic=True)(2j)) == -12
        assert complex(tether.hessian(cube, holomorphic=True)(2j)) == 12j
        assert complex(tether.jacfwd(lambda x: x * 1j)(2.0)) == 1j
        assert complex(tether.jacrev(lambda z: (z * jnp.conj(z)).real)(1 + 2j)) == 2 - 4j
        wrong = [(tether.jacfwd, {}, 2j), (tether.hessian, {}, 2j), (tether.jacrev, {}, 2j)]
        wrong += [(transform, {"holomorphic": True}, 2.0) for transform in FAMILY]
        for transform, options, arg in wrong:
            with pytest.raises(GradientError, match="wrong dtype"):
                transform(cube, **options)(arg)
        with pytest.raises(GradientError, match="wrong dtype") as caught:
            tether.jacrev(lambda net: net(X), holomorphic=True)(Net())
        assert caught.value.at == "net.w"
        of_n, of_x = tether.jacrev(lambda n, x: x * jnp.ones(2), argnums=(0, 1), allow_int=True)(3, 2.0)
        right_n, _ = jax.jacrev(lambda n, x: x * jnp.ones(2), argnums=(0, 1), allow_int=True)(3, 2.0)
        assert (of_n.dtype, of_n.shape) == (right_n.dtype, right_n.shape) and of_x.tolist() == [1, 1]
