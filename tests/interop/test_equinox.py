# SPDX-License-Identifier: Apache-2.0
"""Equinox modules in Tether models, and Tether models in Equinox. The oracle is Equinox by itself."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import errors, nn
from tether.interop.equinox import wrap

eqx = pytest.importorskip("equinox")


class Net(eqx.Module):
    """Parameters, a constant, a setting, a function, a list."""

    layers: list
    table: jax.Array
    activation: Any
    scale: float = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.layers = [eqx.nn.Linear(3, 4, key=k1), eqx.nn.Linear(4, 2, key=k2)]
        self.table = jnp.asarray([2, 1, 0])
        self.activation = jnp.tanh
        self.scale = 0.5

    def __call__(self, x):
        return self.layers[1](self.activation(self.layers[0](x[self.table] * self.scale)))


class Outer(tether.Module):
    def __init__(self, inner, key):
        self.before = nn.Linear(3, 3, key=key)
        self.inner = wrap(inner)

    def __call__(self, x):
        return tether.vmap(self.inner)(self.before(x))


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


@pytest.fixture
def net(key) -> Net:
    return Net(key)


class TestWrapped:
    def test_its_arrays_are_variables(self, net):
        wrapped = wrap(net)
        assert list(tether.variables(wrapped, tether.Param)) == [
            f"params.layers[{i}].{name}" for i in (0, 1) for name in ("weight", "bias")
        ]
        assert list(tether.variables(wrapped, tether.Constant)) == ["constants.table"]
        assert wrapped.params.layers[0].weight is not net.layers[0].weight

    def test_computes_the_same(self, net):
        wrapped, x = wrap(net), jnp.asarray(X[0])
        for f in (wrapped, tether.jit(wrapped), lambda x: tether.vmap(wrapped)(x[None])[0], wrapped.eval()):
            np.testing.assert_allclose(f(x), net(x), rtol=1e-6)

    def test_gradients_are_those_of_equinox(self, net, key):
        model, x = Outer(net, key), jnp.asarray(X)
        grads = tether.jit(tether.grad(lambda model: (model(x) ** 2).sum()))(model)
        h = model.before(x)
        right = eqx.filter_grad(lambda net: (jax.vmap(net)(h) ** 2).sum())(net)
        for i in (0, 1):
            for name in ("weight", "bias"):
                ours = tether.variables(grads)[f"inner.params.layers[{i}].{name}"].value
                np.testing.assert_allclose(ours, getattr(right.layers[i], name), rtol=1e-5, atol=1e-6)

    @pytest.mark.mixed_dtypes
    def test_a_training_loop_is_that_of_equinox(self, net):
        import optax

        wrapped, x = wrap(net), jnp.asarray(X)
        optimizer = tether.Optimizer(wrapped, optax.adam(0.1))

        @tether.jit
        def step(model, optimizer):
            optimizer.update(tether.grad(lambda model: (tether.vmap(model)(x) ** 2).sum())(model))

        tx = optax.adam(0.1)
        state = tx.init(eqx.filter(net, eqx.is_inexact_array))
        for _ in range(3):
            step(wrapped, optimizer)
            grads = eqx.filter_grad(lambda net: (jax.vmap(net)(x) ** 2).sum())(net)
            updates, state = tx.update(grads, state)
            net = eqx.apply_updates(net, updates)
        assert step.traces == 1
        for ours, right in zip(jax.tree.leaves(wrapped.module), jax.tree.leaves(net), strict=True):
            if eqx.is_array(right):
                np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)

    def test_module_is_an_equinox_module_with_the_arrays_of_now(self, net):
        wrapped = wrap(net)
        tether.update(wrapped, {"params.layers[1].bias": jnp.ones(2)})
        module = wrapped.module
        assert type(module) is Net and module.scale == 0.5 and isinstance(module.layers, list)
        np.testing.assert_array_equal(module.layers[1].bias, [1, 1])
        assert eqx.tree_equal(eqx.tree_at(lambda m: m.layers[1].bias, net, jnp.ones(2)), module)

    def test_equal_modules_share_a_compilation(self, key):
        step = tether.jit(lambda model, x: model(x))
        for k in jax.random.split(key, 3):
            step(wrap(Net(k)), jnp.asarray(X[0]))
        assert step.traces == 1
        step(wrap(eqx.tree_at(lambda net: net.activation, Net(key), jnp.sin)), jnp.asarray(X[0]))
        assert step.traces == 2

    def test_copies(self, net):
        wrapped, x = wrap(net), jnp.asarray(X[0])
        for other in (tether.clone(wrapped), pickle.loads(pickle.dumps(wrapped)), jax.tree.map(jnp.copy, wrapped)):
            np.testing.assert_allclose(other(x), net(x), rtol=1e-6)
            assert jax.tree.structure(other) == jax.tree.structure(wrapped)

    def test_ties_are_kept_by_pickle(self, net):
        wrapped = wrap(net)
        one, two = pickle.loads(pickle.dumps(nn.Sequential([wrapped, nn.Identity(), wrapped]))).layers[::2]
        assert one is two
        tied = pickle.loads(pickle.dumps([wrapped, tether.cell(wrapped, "params.layers[0].bias")]))
        assert tether.cell(tied[0], "params.layers[0].bias") is tied[1]

    def test_an_ensemble(self, key):
        ensemble = tether.stack([wrap(Net(k)) for k in jax.random.split(key, 4)])
        y = tether.vmap(lambda member, x: member(x), in_axes=(0, None))(ensemble, jnp.asarray(X[0]))
        np.testing.assert_allclose(y[2], tether.index(ensemble, 2).module(jnp.asarray(X[0])), rtol=1e-5)

    def test_numpy_arrays_are_arrays(self):
        class Table(eqx.Module):
            rows: np.ndarray
            order: np.ndarray

            def __call__(self, i):
                return jnp.asarray(self.rows)[jnp.asarray(self.order)[i]]

        wrapped = wrap(Table(np.ones((2, 3), np.float32), np.asarray([1, 0])))
        kinds = {path: type(variable).__name__ for path, variable in tether.variables(wrapped).items()}
        assert kinds == {"params.rows": "Param", "constants.order": "Constant"}
        assert tether.jit(wrapped)(0).shape == (3,)

    def test_settings_that_have_no_hash(self):
        class Holder(eqx.Module):
            extra: Any
            weight: jax.Array

            def __call__(self, x):
                return self.weight * x

        class Bag(dict):
            """A leaf for JAX, without a hash."""

        one = wrap(Holder(Bag(a=1), jnp.ones(2)))
        assert tether.jit(one)(2.0).tolist() == [2, 2]
        assert jax.tree.structure(one) == jax.tree.structure(one)
        assert jax.tree.structure(one) != jax.tree.structure(wrap(Holder(Bag(a=1), jnp.ones(2))))


class TestRandomness:
    def test_dropout_draws_in_training(self, key):
        wrapped, x = wrap(eqx.nn.Dropout(0.5)), jnp.ones(64)
        first, second = wrapped(x), wrapped(x)
        assert set(np.unique(first)) == {0.0, 2.0} and (first != second).any()
        np.testing.assert_array_equal(wrapped(x, key=key), wrapped(x, key=key))
        np.testing.assert_array_equal(wrapped.eval()(x), x)
        np.testing.assert_array_equal(wrapped(x, training=False), x)

    def test_what_was_set_to_inference_stays(self):
        wrapped, x = wrap(eqx.nn.Dropout(0.5, inference=True)), jnp.ones(64)
        np.testing.assert_array_equal(wrapped(x), x)

    def test_lanes_draw_for_themselves(self):
        y = tether.vmap(wrap(eqx.nn.Dropout(0.5)))(jnp.ones((8, 16)))
        assert len({tuple(row) for row in y.tolist()}) > 1

    def test_nothing_is_drawn_for_what_needs_nothing(self, net):
        wrapped = wrap(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)))
        before = tether.random.draw()
        tether.seed(0)
        wrapped(jnp.ones(2))
        assert tether.random.draw() == before

    def test_a_key_that_has_no_default_is_always_given(self):
        class Noise(eqx.Module):
            def __call__(self, x, *, key):
                return x + jax.random.normal(key, x.shape)

        wrapped, x = wrap(Noise()), jnp.zeros(3)
        assert (wrapped(x) != wrapped(x)).all() and (wrapped.eval()(x) != 0).all()


class TestState:
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.asarray(0.0))

        def __call__(self, x, state):
            count = state.get(self.index)
            return x * count, state.set(self.index, count + 1)

    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, mode, key):
            self.linear = eqx.nn.Linear(3, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode=mode)

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def test_is_read_and_written(self):
        wrapped = wrap(*eqx.nn.make_with_state(self.Counter)())
        step = tether.jit(wrapped)
        assert [float(step(2.0)) for _ in range(3)] == [0, 2, 4] and step.traces == 1
        assert [v.value.tolist() for v in tether.variables(wrapped, tether.State).values()] == [3]

    def test_in_a_loop(self):
        wrapped = wrap(*eqx.nn.make_with_state(self.Counter)())
        _, ys = tether.scan(lambda _, x: (None, wrapped(x)), None, jnp.ones(4))
        assert ys.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("mode", ["batch", "ema"])
    def test_batchnorm_is_that_of_equinox(self, mode, key):
        module, state = eqx.nn.make_with_state(self.Normed)(mode, key)
        wrapped, x = wrap(module, state), jnp.asarray(X)
        batched = tether.jit(lambda model, x: tether.vmap(model, axis_name="batch")(x))
        for step in range(3):
            y = batched(wrapped, x + step)
            right, state = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x + step, state)
            np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-5)
        inference = eqx.nn.inference_mode(module)
        right, _ = jax.vmap(inference, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        np.testing.assert_allclose(tether.vmap(wrapped.eval(), axis_name="batch")(x), right, rtol=1e-4, atol=1e-5)

    def test_gradient_passes_through(self, key):
        module, state = eqx.nn.make_with_state(self.Normed)("batch", key)
        wrapped, x = wrap(module, state), jnp.asarray(X)
        c = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32))
        grads = tether.grad(lambda model: (c * tether.vmap(model, axis_name="batch")(x)).sum())(wrapped)

        def loss(module, state):
            y, _ = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return (c * y).sum()

        right = eqx.filter_grad(loss)(module, state)
        ours = tether.variables(grads)["params.linear.weight"].value
        np.testing.assert_allclose(ours, right.linear.weight, rtol=1e-4, atol=1e-5)


class TestMessages:
    @pytest.mark.parametrize(
        ("value", "got", "fix"),
        [
            (jnp.tanh, "PjitFunction object", "nn.Lambda(f) makes a layer of a function"),
            (eqx.nn.Linear, "the class Linear", "make one: Linear(...)"),
        ],
    )
    def test_no_equinox_module(self, value, got, fix):
        with pytest.raises(errors.ArgumentError) as error:
            wrap(value)
        assert error.value.what == "interop.equinox.wrap: this is no Equinox module." and error.value.fixes == [fix]

    @pytest.mark.parametrize("state", [None, {}])
    def test_state_is_missing(self, state):
        module, _ = eqx.nn.make_with_state(TestState.Counter)()
        with pytest.raises(errors.ArgumentError) as error:
            wrap(module, state)
        assert str(error.value) == (
            "interop.equinox.wrap: the module has state, and this is not it.\n"
            "  at:       Counter\n"
            f"  got:      state={'None' if state is None else 'dict of 0'}\n"
            "  expected: the equinox.nn.State of the module\n"
            "  fix:      wrap(*equinox.nn.make_with_state(Counter)(...))"
        )

    def test_no_state(self, net):
        with pytest.raises(errors.ArgumentError) as error:
            wrap(net, 3)
        assert str(error.value) == (
            "interop.equinox.wrap: this is no state.\n"
            "  at:       Net\n"
            "  got:      state=3\n"
            "  expected: None, or an equinox.nn.State\n"
            "  fix:      wrap(module)"
        )

    def test_state_that_does_not_come_back(self):
        class Forgets(TestState.Counter):
            def __call__(self, x, state):
                return x

        wrapped = wrap(*eqx.nn.make_with_state(Forgets)())
        with pytest.raises(errors.StructureError) as error:
            wrapped(jnp.ones(2))
        assert str(error.value) == (
            "interop.equinox: a module with state didn't return its new state.\n"
            "  at:       the module itself  (Wrapped)\n"
            "  got:      float32[2]\n"
            "  expected: (output, state)\n"
            "  fix:      return out, state, in the call of the Equinox module"
        )

    def test_an_unwrapped_module_as_an_attribute(self, net):
        class Bare(tether.Module):
            def __init__(self):
                self.net = net

        with pytest.raises(errors.DeclarationError, match="an array in a module must say what it is"):
            Bare()


class TestTetherInEquinox:
    """Nothing is needed for it: a model is a pytree, by value where it is an argument."""

    @pytest.fixture
    def model(self, key) -> nn.Sequential:
        k1, k2 = jax.random.split(key)
        return nn.Sequential([nn.Linear(3, 4, key=k1), nn.BatchNorm(4), nn.Linear(4, 2, key=k2)])

    def test_filter_jit(self, model):
        x, view = jnp.asarray(X), model.eval()
        y = view(x)
        np.testing.assert_allclose(eqx.filter_jit(lambda model, x: model(x))(view, x), y, rtol=1e-5)
        np.testing.assert_allclose(eqx.filter_jit(view)(x), y, rtol=1e-5)
        np.testing.assert_allclose(eqx.filter_jit(lambda x: view(x))(x), y, rtol=1e-5)

    def test_filter_grad(self, model):
        x, view = jnp.asarray(X), model.eval()
        grads = eqx.filter_grad(lambda model: (model(x) ** 2).sum())(view)
        right = tether.grad(lambda model: (model(x) ** 2).sum())(view)
        np.testing.assert_allclose(grads[0].weight, right[0].weight, rtol=1e-5)
        assert grads[1].mean is not None and right[1].mean is None  # it differentiates every floating array
        of_x = eqx.filter_grad(lambda x: (view(x) ** 2).sum())(x)
        np.testing.assert_allclose(of_x, tether.grad(lambda x: (view(x) ** 2).sum())(x), rtol=1e-5)

    def test_filter_vmap(self, model):
        x, view = jnp.asarray(X), model[0]
        np.testing.assert_allclose(eqx.filter_vmap(view)(x), view(x), rtol=1e-5)
        ensemble = eqx.filter_vmap(lambda key: nn.Linear(3, 2, key=key))(jax.random.split(jax.random.key(0), 4))
        assert ensemble.weight.shape == (4, 2, 3)
        y = eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))(ensemble, x)
        assert y.shape == (4, 5, 2)

    def test_a_step_as_equinox_writes_it(self, model):
        x, view = jnp.asarray(X), tether.view(model, nn.BatchNorm, training=False)

        @eqx.filter_jit
        def step(model):
            value, grads = eqx.filter_value_and_grad(lambda model: (model(x) ** 2).sum())(model)
            return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

        value, new = step(view)
        assert type(new) is nn.Sequential and float((new(x) ** 2).sum()) < float(value)
        right = tether.grad(lambda model: (model(x) ** 2).sum())(view)
        np.testing.assert_allclose(new[0].weight, view[0].weight - 0.1 * right[0].weight, rtol=1e-4, atol=1e-6)

    def test_state_that_is_written_to_a_copy_comes_back_with_the_copy(self, model):
        new, y = eqx.filter_jit(lambda model, x: (model, model(x)))(model, jnp.asarray(X))
        np.testing.assert_array_equal(model[1].mean, np.zeros(4))
        np.testing.assert_allclose(model(jnp.asarray(X)), y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(new[1].mean, model[1].mean, rtol=1e-5)

    def test_state_that_is_written_in_the_closure_lands(self, model):
        eqx.filter_jit(lambda x: model(x))(jnp.asarray(X))
        assert float(jnp.abs(model[1].mean).max()) > 0

    def test_as_a_field(self, model, key):
        class Both(eqx.Module):
            first: eqx.nn.Linear
            second: tether.Module

            def __call__(self, x):
                return self.second(jax.vmap(self.first)(x))

        both, x = Both(eqx.nn.Linear(3, 3, key=key), model.eval()), jnp.asarray(X)
        np.testing.assert_allclose(eqx.filter_jit(both)(x), both(x), rtol=1e-5)
        grads = eqx.filter_grad(lambda both: (both(x) ** 2).sum())(both)
        assert grads.first.weight.shape == (3, 3) and grads.second[0].weight.shape == (4, 3)

    def test_tree_functions(self, model, tmp_path):
        new = eqx.tree_at(lambda model: model[0].weight, model, jnp.zeros((4, 3)))
        assert not new[0].weight.any() and model[0].weight.any() and not eqx.tree_equal(new, model)
        assert eqx.tree_equal(eqx.combine(*eqx.partition(model, eqx.is_array)), model)
        eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "model.eqx", new), model)

    @pytest.mark.parametrize(
        "use",
        [
            lambda f, model, x: eqx.filter_checkpoint(f)(model, x),
            lambda f, model, x: eqx.filter_eval_shape(f, model, x),
        ],
        ids=["filter_checkpoint", "filter_eval_shape"],
    )
    def test_parted_outside_and_combined_inside(self, model, use):
        x, view = jnp.asarray(X), model.eval()
        assert use(lambda model, x: model(x), view, x).shape == (5, 2)
