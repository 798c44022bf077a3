# SPDX-License-Identifier: Apache-2.0
"""Optimizer against optax on plain dicts; what it leaves alone; what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tether import nn
from tether.errors import OptimizerError, SelectionError

X = np.asarray([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]], np.float32)


class Model(tether.Module):
    def __init__(self):
        self.linear = nn.Linear(2, 2, key=jax.random.key(0))
        self.norm = nn.BatchNorm(2)
        self.count = tether.State(0)
        self.table = tether.Constant(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        self.count = self.count + 1
        return self.linear(self.norm(x)) * self.table[None]


def loss(model: Any) -> Any:
    return (model(X) ** 2 * jnp.asarray([[1.0, 2.0]])).mean() + (model.linear.weight**2).sum()


def params(model: Any) -> dict[str, Any]:
    return {path: np.asarray(v.value) for path, v in tether.variables(model, tether.Param).items()}


def dict_loss(p: dict[str, Any]) -> Any:
    """The same loss by hand, over a flat dict."""
    h = (X - X.mean(0, keepdims=True)) / np.sqrt(X.var(0, keepdims=True) + 1e-5)
    h = h * p["norm.weight"][None] + p["norm.bias"][None]
    h = h @ p["linear.weight"].T + p["linear.bias"][None]
    return (h**2 * jnp.asarray([[1.0, 2.0]])).mean() + (p["linear.weight"] ** 2).sum()


def by_hand(tx: Any, start: dict[str, Any], steps: int) -> dict[str, Any]:
    p = {path: jnp.asarray(value) for path, value in start.items()}
    state = tx.init(p)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(dict_loss)(p), state, p)
        p = optax.apply_updates(p, updates)
    return p


TRANSFORMATIONS = {
    "adamw": optax.adamw(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "masked": optax.masked(optax.sgd(0.1), lambda p: {path: path.endswith("weight") for path in p}),
    "multi": optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.adam(0.1)}, lambda p: {path: "b" if "norm" in path else "a" for path in p}
    ),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("adamw", False), ("adamw", True), ("adamw", "donated"), ("clip", True), ("masked", True), ("multi", True)],
)
def test_steps_equal_optax_on_a_dict(name: str, compiled: Any):
    model, tx = Model(), TRANSFORMATIONS[name]
    start = params(model)
    optimizer = tether.Optimizer(model, tx)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(tether.grad(loss)(model))

    if compiled:
        step = tether.jit(step, donate_state=compiled == "donated")
    for _ in range(3):
        step(model, optimizer)
    for path, value in by_hand(tx, start, 3).items():
        np.testing.assert_allclose(params(model)[path], value, rtol=2e-5, atol=2e-6)
    assert int(model.count) == 3 and model.table.tolist() == [1, 1]
    if compiled:
        assert step.traces == 1


def test_learning_rate_is_state_and_can_be_set():
    model = nn.Linear(2, 1)
    optimizer = tether.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    grads = {"weight": jnp.ones((1, 2)), "bias": jnp.zeros(1)}
    step = tether.jit(lambda g: optimizer.update(g))
    before = np.asarray(model.weight)
    step(grads)
    np.testing.assert_allclose(model.weight, before - 0.5, rtol=1e-6)
    tether.cell(optimizer, "state.hyperparams['learning_rate']").value = 0.25
    step(grads)
    np.testing.assert_allclose(model.weight, before - 0.75, rtol=1e-6)
    assert step.traces == 1


def test_lbfgs_with_a_value_function():
    model = nn.Linear(2, 1, key=jax.random.key(0))
    tx = optax.lbfgs()
    optimizer = tether.Optimizer(model, tx)
    p = {path: jnp.asarray(v) for path, v in params(model).items()}
    f = lambda p: ((X @ p["weight"].T + p["bias"][None]) ** 2).sum() + (p["weight"] - 1).sum() ** 2
    state = tx.init(p)
    for _ in range(2):
        value, grads = jax.value_and_grad(f)(p)
        updates, state = tx.update(grads, state, p, value=value, grad=grads, value_fn=f)
        value, grads = jax.value_and_grad(f)(params_as_arrays(model))
        optimizer.update(grads, value=value, grad=grads, value_fn=f)
        p = optax.apply_updates(p, updates)
    for path, value in p.items():
        np.testing.assert_allclose(params(model)[path], value, rtol=1e-4, atol=1e-5)


def params_as_arrays(model: Any) -> dict[str, Any]:
    return {path: v.value for path, v in tether.variables(model, tether.Param).items()}


class TestUntouched:
    """None means untouched: not decayed, no slot moved."""

    def test_none(self):
        model = nn.Linear(2, 1)
        optimizer = tether.Optimizer(model, optax.adamw(0.1, weight_decay=0.5))
        optimizer.update({"weight": jnp.ones((1, 2)), "bias": jnp.ones(1)})
        bias = model.bias
        slot = tether.cell(optimizer, "state[0].mu['bias']")
        moment = slot.value
        for grads in ({"weight": jnp.ones((1, 2))}, {"weight": jnp.ones((1, 2)), "bias": None}):
            optimizer.update(grads)
        assert model.bias.tolist() == bias.tolist() and slot.value.tolist() == moment.tolist()
        assert float(tether.cell(optimizer, "state[0].mu['weight']").value[0, 0]) == pytest.approx(1 - 0.9**3)

    def test_frozen_after_the_optimizer_was_made(self):
        model = Model()
        optimizer = tether.Optimizer(model, optax.adamw(0.1))
        before = params(model)
        optimizer.update(tether.grad(loss)(tether.freeze(model, "norm")))
        after = params(model)
        assert (after["norm.weight"] == before["norm.weight"]).all()
        assert not (after["linear.weight"] == before["linear.weight"]).all()

    def test_frozen_before_has_no_slot(self):
        model = tether.freeze(Model(), "norm")
        optimizer = tether.Optimizer(model, optax.sgd(0.1))
        assert optimizer.paths == ("linear.weight", "linear.bias")

    def test_state_and_constant_are_never_changed(self):
        model = Model()
        optimizer = tether.Optimizer(model, optax.sgd(0.1))
        for wrong in ({"norm.mean": jnp.ones(2)}, {"table": jnp.ones(2)}):
            with pytest.raises(OptimizerError, match="without a slot"):
                optimizer.update(wrong)


class TestTies:
    def test_one_slot(self):
        class Tied(tether.Module):
            def __init__(self):
                self.a, self.b = nn.Linear(2, 2, use_bias=False), nn.Linear(2, 2, use_bias=False)
                self.b.weight = tether.cell(self.a, "weight")

        model = Tied()
        model.a.weight = jnp.asarray([[1.0, 3.0], [2.0, 4.0]])
        optimizer = tether.Optimizer(model, optax.sgd(1.0, momentum=0.9))
        assert list(tether.variables(optimizer)) == ["state[0].trace['a.weight']"]
        optimizer.update(tether.grad(lambda m: m.b(m.a(jnp.ones(2))).sum())(model))
        # O5 transposed: K = W^T, the gradient of K is [[7, 11], [9, 13]]
        np.testing.assert_allclose(model.b.weight, [[1 - 7, 3 - 9], [2 - 11, 4 - 13]])


class TestSelections:
    def test_wrt(self):
        model = Model()
        optimizer = tether.Optimizer(model, optax.sgd(0.1), wrt=nn.Linear)
        before = params(model)
        optimizer.update(tether.grad(loss, wrt=nn.Linear)(model))
        assert (params(model)["norm.weight"] == before["norm.weight"]).all()
        with pytest.raises(OptimizerError) as caught:
            optimizer.update(tether.grad(loss)(model))
        assert caught.value.at == "norm.weight"

    def test_state_by_name(self):
        model = Model()
        optimizer = tether.Optimizer(model, optax.sgd(1.0), wrt="norm.mean")
        optimizer.update({"norm.mean": jnp.ones(2)})
        assert model.norm.mean.tolist() == [-1, -1]

    def test_integers_are_left_out(self):
        assert "count" not in tether.Optimizer(Model(), optax.sgd(0.1), wrt=tether.Variable).paths

    def test_nothing(self):
        with pytest.raises(SelectionError):
            tether.Optimizer(Model(), optax.sgd(0.1), wrt="nothing")


class TestRefused:
    """Whatever is refused changes nothing, and the next step works."""

    @pytest.mark.parametrize(
        "grads",
        [
            {"nothing": jnp.ones(2)},
            {"linear.weight": jnp.ones(2)},
            {"linear.weight": jnp.ones((2, 2)), "linear.bias": jnp.ones(3)},
            {},
            {"linear.weight": None},
            jnp.ones(2),
            None,
            [jnp.ones((2, 2))],
            nn.Linear(3, 3),
        ],
    )
    def test_gradients_that_do_not_match(self, grads: Any):
        model = Model()
        optimizer = tether.Optimizer(model, optax.adam(0.1))
        values = lambda: [np.asarray(leaf).tolist() for leaf in jax.tree.leaves((model, optimizer))]
        before = values()
        with pytest.raises(OptimizerError):
            optimizer.update(grads)
        assert values() == before
        optimizer.update({"linear.bias": jnp.ones(2)})
        assert values() != before

    def test_a_transformation_that_fails_midway(self):
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return updates, {"count": state["count"] + 1, "more": jnp.ones(2)}

        tx = optax.GradientTransformation(lambda p: {"count": jnp.zeros((), jnp.int32)}, update)
        model = nn.Linear(2, 1)
        optimizer = tether.Optimizer(model, tx)
        before = model.weight
        with pytest.raises(OptimizerError, match="structure of its state"):
            optimizer.update({"weight": jnp.ones((1, 2))})
        assert model.weight is before

    @pytest.mark.parametrize(
        "make", [lambda m: (optax.sgd(0.1), m), lambda m: (m, 0.1), lambda m: (3, optax.sgd(0.1)), lambda m: (m, None)]
    )
    def test_arguments(self, make: Any):
        with pytest.raises(OptimizerError):
            tether.Optimizer(*make(Model()))

    @pytest.mark.parametrize(
        "copied", [tether.clone, lambda o: jax.tree.map(lambda x: x, o), lambda o: tether.filter(o, tether.State)]
    )
    def test_a_copy_without_its_model(self, copied: Any):
        with pytest.raises(OptimizerError, match="copy"):
            copied(tether.Optimizer(Model(), optax.sgd(0.1))).update({"linear.bias": jnp.ones(2)})


def test_the_model_is_no_leaf_of_it():
    model = nn.Linear(2, 1)
    assert jax.tree.leaves(tether.Optimizer(model, optax.sgd(0.1))) == []
    optimizer = tether.Optimizer(model, optax.adam(0.1))
    assert len(jax.tree.leaves(optimizer)) == 5
    assert optimizer.model is model


def test_equal_optimizers_share_one_trace():
    """CASES 35: twenty fresh models, each with its optimizer."""
    step = tether.jit(lambda m, o: o.update(tether.grad(lambda m: (m(X) ** 2).mean())(m)))
    for seed in range(5):
        model = nn.Linear(2, 1, key=jax.random.key(seed))
        step(model, tether.Optimizer(model, optax.sgd(0.1)))
    assert step.traces == 1
