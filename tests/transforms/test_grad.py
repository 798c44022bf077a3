# SPDX-License-Identifier: Apache-2.0
"""grad and value_and_grad: argument numbers, modules, selections, closures, State, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, GradientError, SelectionError

X = np.array([[0.5, -1.0], [2.0, 1.5], [1.0, 3.0]], np.float32)


class Net(tether.Module):
    """y = (x @ w + b) ** 2, summed; w trained, b a State that is read after it is written."""

    def __init__(self):
        self.w = tether.Param(jnp.array([2.0, -1.0]))
        self.b = tether.State(0.5)
        self.n = tether.State(0)
        self.c = tether.Constant(3.0)

    def __call__(self, x):
        self.n = self.n + 1
        self.b = self.b * self.w[0]
        return (self.c * (x @ self.w + self.b) ** 2).sum()


def by_hand(w, x=X, b=0.5):
    return (3.0 * (x @ w + b * w[0]) ** 2).sum()


W = jnp.array([2.0, -1.0])


class TestArgnums:
    f = staticmethod(lambda x, y, z: (x**2 * y + y * z).sum())
    args = (jnp.float32(2), jnp.float32(3), jnp.float32(5))
    right = (12.0, 9.0, 3.0)

    @pytest.mark.parametrize(
        ("argnums", "indices"),
        [
            *[(None, 0), (0, 0), (1, 1), (2, 2), (-1, 2), (-3, 0), ("y", 1)],
            *[((0,), (0,)), ((2, 0), (2, 0)), ([1, -1], (1, 2)), (("z", 0), (2, 0))],
        ],
    )
    def test_mean_the_users_arguments(self, argnums, indices):
        fun = lambda x, y, z: self.f(x, y, z)
        value, gradient = tether.value_and_grad(fun, argnums=argnums)(*self.args)
        assert float(value) == 27.0
        if isinstance(indices, tuple):
            assert isinstance(gradient, tuple)
            assert [float(g) for g in gradient] == [self.right[i] for i in indices]
        else:
            assert float(gradient) == self.right[indices]

    @pytest.mark.parametrize("argnums", [3, -4, (0, 7), True, "w", 1.5, (0, 0), (0, -3)])
    def test_wrong_ones_print_the_signature(self, argnums):
        def energy(x, y, z):
            return x * y * z

        with pytest.raises(ArgumentError, match=r"energy\(x, y, z\)"):
            tether.grad(energy, argnums=argnums)(*self.args)

    def test_self_of_a_bound_method_is_not_counted(self):
        class Model(tether.Module):
            def __init__(self):
                self.w = tether.Param(2.0)

            def loss(self, x, y):
                return self.w * x**2 * y

        loss = Model().loss
        assert float(tether.grad(loss)(3.0, 5.0)) == 60.0
        assert float(tether.grad(loss, argnums=1)(3.0, 5.0)) == 18.0
        assert float(tether.grad(loss, argnums=-1)(3.0, 5.0)) == 18.0
        with pytest.raises(ArgumentError, match=r"loss\(x, y\)"):
            tether.grad(loss, argnums=2)(3.0, 5.0)

    def test_decorator_with_options(self):
        @tether.grad(argnums=1)
        def f(x, y):
            return x * y**2

        assert float(f(3.0, 2.0)) == 12.0
        assert f.__name__ == "f"

    def test_keyword_arguments_pass_through(self):
        assert float(tether.grad(lambda x, *, y: x * y)(3.0, y=4.0)) == 4.0

    def test_pytrees_of_arrays(self):
        gradient = tether.grad(lambda tree: tree["a"] * tree["b"][0] ** 2)({"a": 2.0, "b": [3.0]})
        assert jax.tree.map(float, gradient) == {"a": 9.0, "b": [12.0]}


class TestModules:
    def test_gradient_has_the_shape_of_the_module(self):
        net = Net()
        value, gradient = tether.value_and_grad(lambda net: net(X))(net)
        assert float(value) == pytest.approx(float(by_hand(W)), rel=1e-6)
        assert isinstance(gradient, Net) and gradient is not net
        np.testing.assert_allclose(gradient.w, jax.grad(by_hand)(W), rtol=1e-6)
        assert gradient.b is None and gradient.n is None and gradient.c is None
        assert jax.tree.leaves(gradient)[0] is gradient.w

    def test_state_is_written_once_without_tangents(self):
        net = Net()
        tether.grad(lambda net: net(X))(net)
        assert (float(net.b), int(net.n)) == (1.0, 1)
        assert not isinstance(net.b, jax.core.Tracer)
        np.testing.assert_allclose(
            tether.grad(lambda net: net(X))(net).w, jax.grad(lambda w: by_hand(w, b=1.0))(W), rtol=1e-6
        )
        assert (float(net.b), int(net.n)) == (2.0, 2)

    def test_write_read_write_keeps_the_tangent(self):
        h = tether.State(1.0)

        def f(w):
            h.value = w * h.value
            h.value = w * h.value
            return h.value

        assert float(tether.grad(f)(3.0)) == 6.0  # d(w^2)/dw
        assert float(h.value) == 9.0
        assert float(tether.grad(tether.grad(f))(3.0)) == 18.0  # h starts at 9

    def test_several_modules_and_arrays(self):
        one, two = Net(), Net()
        gradients = tether.grad(lambda a, x, b: a(x) + 2 * b(x), argnums=(2, 0, 1))(one, jnp.asarray(X), two)
        right = jax.grad(by_hand)(W)
        np.testing.assert_allclose(gradients[0].w, 2 * right, rtol=1e-6)
        np.testing.assert_allclose(gradients[1].w, right, rtol=1e-6)
        np.testing.assert_allclose(gradients[2], 3 * jax.grad(lambda x: by_hand(W, x))(jnp.asarray(X)), rtol=1e-6)

    def test_container_of_modules(self):
        nets = {"a": Net(), "b": [Net()]}
        gradient = tether.grad(lambda nets: nets["a"](X) + 3 * nets["b"][0](X))(nets)
        right = jax.grad(by_hand)(W)
        np.testing.assert_allclose(gradient["a"].w, right, rtol=1e-6)
        np.testing.assert_allclose(gradient["b"][0].w, 3 * right, rtol=1e-6)

    def test_model_closed_over_and_argument_is_one_model(self):
        net = Net()
        gradient = tether.grad(lambda other: other.w.sum() * 2 + net.w.sum())(net)
        np.testing.assert_array_equal(gradient.w, [3.0, 3.0])

    def test_the_same_model_twice_gets_the_total(self):
        net = Net()
        one, two = tether.grad(lambda a, b: (a.w * b.w).sum(), argnums=(0, 1))(net, net)
        np.testing.assert_array_equal(one.w, 2 * W)
        np.testing.assert_array_equal(two.w, 2 * W)

    def test_tied_weight_has_one_gradient(self):
        class Tied(tether.Module):
            def __init__(self):
                self.a = nn.Linear(2, 2, use_bias=False)
                self.b = nn.Linear(2, 2, use_bias=False)
                self.b.weight = tether.cell(self.a, "weight")

        tied = Tied()
        tied.a.weight = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        gradient = tether.grad(lambda t: (jnp.ones((1, 2)) @ t.a.weight @ t.b.weight).sum())(tied)
        np.testing.assert_array_equal(gradient.a.weight, [[7.0, 11.0], [9.0, 13.0]])
        np.testing.assert_array_equal(gradient.b.weight, [[7.0, 11.0], [9.0, 13.0]])
        assert len(jax.tree.leaves(gradient)) == 1

    def test_frozen_params_are_passed_by(self):
        model = nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 1)])
        gradient = tether.grad(lambda m: m(X).sum())(tether.freeze(model, "[0]"))
        assert gradient[0].weight is None and gradient[0].bias is None
        np.testing.assert_allclose(gradient[1].bias, [3.0], rtol=1e-6)

    def test_unused_params_have_zero_gradients(self):
        net = Net()
        np.testing.assert_array_equal(tether.grad(lambda net, x: (x * 2).sum())(net, X).w, [0.0, 0.0])


class TestWrt:
    def test_selection_narrows(self):
        model = nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 1)])
        gradient = tether.grad(lambda m: m(X).sum(), wrt="[1].bias")(model)
        assert [path for path, v in tether.variables(gradient).items() if v.value is not None] == ["[1].bias"]

    def test_state_and_constants_when_asked(self):
        net = Net()
        gradient = tether.grad(lambda net: net(X), wrt=[tether.State, tether.Constant])(net)
        np.testing.assert_allclose(gradient.b, jax.grad(lambda b: by_hand(W, b=b))(0.5), rtol=1e-6)
        np.testing.assert_allclose(gradient.c, by_hand(W) / 3, rtol=1e-6)
        assert gradient.w is None and gradient.n is None

    def test_closed_over_module(self):
        net = Net()
        gradient = tether.grad(lambda: net(X), wrt=net)()
        np.testing.assert_allclose(gradient.w, jax.grad(by_hand)(W), rtol=1e-6)
        assert int(net.n) == 1

    def test_closed_over_variables_and_containers(self):
        net, scale = Net(), tether.Param(2.0)
        f = lambda x: scale.value * net(x)
        assert float(tether.grad(f, wrt=scale)(X)) == pytest.approx(float(by_hand(W)), rel=1e-6)
        net = Net()
        gradients = tether.grad(f, wrt={"net": net, "rest": [scale]})(X)
        np.testing.assert_allclose(gradients["net"].w, 2 * jax.grad(by_hand)(W), rtol=1e-6)
        assert float(gradients["rest"][0]) == pytest.approx(float(by_hand(W)), rel=1e-6)

    def test_excludes_argnums(self):
        with pytest.raises(ArgumentError, match="argnums"):
            tether.grad(lambda x: x, argnums=0, wrt=Net())

    def test_unknown_path(self):
        with pytest.raises(SelectionError, match="weights"):
            tether.grad(lambda m: m(X).sum(), wrt="weights")(nn.Linear(2, 1))


class TestAux:
    def test_pairs(self):
        net = Net()
        (value, aux), gradient = tether.value_and_grad(lambda x: (net(x), {"n": net.n, "net": net}), has_aux=True)(X)
        assert float(value) == pytest.approx(float(by_hand(W)), rel=1e-6)
        assert int(aux["n"]) == 1 and aux["net"] is net
        np.testing.assert_allclose(gradient, jax.grad(lambda x: by_hand(W, x))(jnp.asarray(X)), rtol=1e-6)
        gradient, aux = tether.grad(lambda x: (x**2, "text"), has_aux=True)(3.0)
        assert (float(gradient), aux) == (6.0, "text")

    def test_aux_carries_no_tracer(self):
        _, aux = tether.grad(lambda x: (x**2, x * 5), has_aux=True)(3.0)
        assert isinstance(aux, jax.Array) and not isinstance(aux, jax.core.Tracer) and float(aux) == 15.0

    def test_new_module_in_aux_is_a_copy(self):
        _, made = tether.grad(lambda x: (x**2, nn.Linear(2, 3, key=jax.random.key(0))), has_aux=True)(3.0)
        assert not isinstance(made.weight, jax.core.Tracer)
        np.testing.assert_array_equal(made.weight, nn.Linear(2, 3, key=jax.random.key(0)).weight)
        made.weight = jnp.zeros((3, 2))

    def test_no_pair(self):
        with pytest.raises(GradientError, match="has_aux"):
            tether.grad(lambda x: x, has_aux=True)(1.0)


class TestErrors:
    def test_no_float(self):
        for args in [(3,), (np.arange(3),), (True,), ("text",), (jax.random.key(0),)]:
            with pytest.raises(GradientError, match="no float"):
                tether.grad(lambda x: 1.0)(*args)

    def test_module_without_params(self):
        with pytest.raises(GradientError, match="no float"):
            tether.grad(lambda m: 1.0)(nn.Dropout(0.5))
        with pytest.raises(GradientError, match="no float"):
            tether.grad(lambda m: m(X).sum())(tether.freeze(nn.Linear(2, 1)))

    @pytest.mark.parametrize("out", [np.ones(2, np.float32), 3, "text", None, (1.0, 2.0), 1j])
    def test_result_is_no_real_scalar(self, out):
        with pytest.raises(GradientError, match="scalar"):
            tether.grad(lambda x: out)(1.0)

    def test_allow_int_and_holomorphic(self):
        assert tether.grad(lambda x: 2.0 * 1, allow_int=True)(3).dtype == jax.dtypes.float0
        assert complex(tether.grad(lambda z: z**2, holomorphic=True)(1 + 2j)) == 2 + 4j

    @pytest.mark.parametrize("stop", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_failure_writes_nothing(self, stop):
        net, stopping = Net(), [stop]

        def f(x):
            y = net(x)
            if stopping:
                raise stopping[0]
            return y

        for call in (tether.grad(f), tether.grad(lambda x: tether.grad(f)(x).sum()), tether.jit(tether.grad(f))):
            with pytest.raises(type(stop)):
                call(X)
            assert (float(net.b), int(net.n)) == (0.5, 0)
        stopping.clear()
        np.testing.assert_allclose(tether.grad(f)(X), jax.grad(lambda x: by_hand(W, x))(jnp.asarray(X)), rtol=1e-6)
        assert int(net.n) == 1


class TestHigherOrder:
    def test_hessian_vector_product_and_maml(self):
        net = Net()
        inner = lambda w: by_hand(w)

        def adapted(lr):
            gradient = tether.grad(lambda n: n(X))(net)
            return ((net.w - lr * gradient.w) ** 2).sum()

        def by_hand_adapted(lr):
            return ((W - lr * jax.grad(inner)(W)) ** 2).sum()

        assert float(tether.grad(adapted)(0.01)) == pytest.approx(float(jax.grad(by_hand_adapted)(0.01)), rel=1e-5)
        assert int(net.n) == 1

    def test_outer_gradient_through_an_inner_one_of_the_same_model(self):
        net = Net()

        def penalty(net):
            return (tether.grad(lambda n: n(X))(net).w ** 2).sum()

        right = jax.grad(lambda w: (jax.grad(by_hand)(w) ** 2).sum())(W)
        np.testing.assert_allclose(tether.grad(penalty)(net).w, right, rtol=1e-5)
        assert (float(net.b), int(net.n)) == (1.0, 1)

    def test_gan_step_with_the_norm_of_another_network_inside(self):
        a, b = nn.Linear(2, 2, key=jax.random.key(0)), nn.BatchNorm(2)
        c = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]], np.float32)

        def by_hand_loss(w, bias, x):
            h = x @ w.T + bias[None]
            return (((h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)) * c).sum()

        mean = np.zeros(2)
        for _ in range(2):
            gradient = tether.grad(lambda a: (b(a(X)) * c).sum())(a)
            right = jax.grad(by_hand_loss)(a.weight, a.bias, jnp.asarray(X))
            np.testing.assert_allclose(gradient.weight, right, rtol=1e-3, atol=1e-4)
            mean = 0.9 * mean + 0.1 * np.asarray(a(X)).mean(0)
            np.testing.assert_allclose(b.mean, mean, rtol=1e-5)


def test_with_an_optimizer_state_and_ints_do_not_move():
    import optax

    net = Net()
    optimizer = tether.Optimizer(net, optax.sgd(0.1))
    gradient = tether.grad(lambda net: net(X))(net)
    before = np.asarray(net.w)
    optimizer.update(gradient)
    np.testing.assert_allclose(net.w, before - 0.1 * np.asarray(gradient.w), rtol=1e-6)
    assert (float(net.b), int(net.n), float(net.c)) == (1.0, 1, 3.0)
