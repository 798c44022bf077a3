# SPDX-License-Identifier: Apache-2.0
"""clone and snapshot: buffers of their own, ties kept across a container."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tether import nn
from tether.errors import OptimizerError


@pytest.mark.parametrize("copied", [tether.clone, tether.snapshot])
class TestCopies:
    def test_values_kinds_and_structure(self, copied: Any):
        model = nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2)])
        other = copied(model)
        assert jax.tree.structure(other) == jax.tree.structure(model)
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()

    def test_survives_a_donated_step(self, copied: Any):
        counter = tether.State(jnp.zeros(3))

        @tether.jit(donate_state=True)
        def step() -> None:
            counter.value = counter.value + 1

        step()
        step()
        before = copied(counter)
        step()
        assert before.value.tolist() == [2, 2, 2] and counter.value.tolist() == [3, 3, 3]

    def test_views_and_stacked(self, copied: Any):
        model = tether.freeze(nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2)]).eval(), "[0]")
        other = copied(model)
        assert (other.training, list(tether.variables(other, tether.Param))) == (False, ["[1].weight", "[1].bias"])
        stacked = copied(tether.stack([nn.Linear(2, 2), nn.Linear(2, 2)]))
        assert len(tether.unstack(stacked)) == 2

    def test_typed_keys_and_shardings(self, copied: Any):
        rng = copied(tether.Rng(jax.random.key(1, impl="rbg")))
        assert str(jax.random.key_impl(rng.value)) == "rbg"
        placed = tether.State(jax.device_put(jnp.ones(2), jax.devices()[1]))
        assert copied(placed).value.devices() == {jax.devices()[1]}

    def test_loose_state_of_a_pytree(self, copied: Any):
        cache: Any = tether.State({"a": jnp.zeros(2)})
        before = copied(cache)
        cache.value = {"a": jnp.ones(2)}
        assert before.value["a"].tolist() == [0, 0]

    def test_other_leaves_are_handed_through(self, copied: Any):
        linear = nn.Linear(2, 2)
        other = copied({"m": linear, "lr": 0.1, "name": "x", "none": None})
        assert (other["lr"], other["name"], other["none"]) == (0.1, "x", None)
        assert other["m"] is not linear

    def test_inside_a_transformation(self, copied: Any):
        linear = nn.Linear(2, 1)

        def loss(model: Any) -> Any:
            other = copied(model)
            other.weight = other.weight * 2
            return other(jnp.ones(2)).sum()

        assert tether.grad(loss)(linear).weight.tolist() == [[2, 2]]
        assert not isinstance(linear.weight, jax.core.Tracer)


class TestTies:
    def test_across_a_container(self):
        linear = nn.Linear(2, 2)
        model, teacher = nn.Sequential([linear]), nn.Sequential([linear, nn.Linear(2, 1)])
        loose = tether.cell(linear, "weight")
        a, b, c = tether.clone((model, teacher, loose))
        assert tether.cell(a, "[0].weight") is tether.cell(b, "[0].weight") is c
        assert c is not loose
        assert a is not model and b is not teacher

    def test_the_same_object_twice_is_one(self):
        linear = nn.Linear(2, 2)
        a, b = tether.clone([linear, linear])
        assert a is b

    def test_an_optimizer_with_its_model(self):
        model = nn.Linear(2, 1)
        optimizer = tether.Optimizer(model, optax.sgd(1.0))
        new_model, new_optimizer = tether.clone((model, optimizer))
        before = model.weight
        new_optimizer.update({"weight": jnp.ones((1, 2))})
        np.testing.assert_allclose(new_model.weight, before - 1, rtol=1e-6)
        assert model.weight is before

    def test_an_optimizer_inside_the_tree_of_its_model(self):
        class Trainer(tether.Module):
            def __init__(self):
                self.model = nn.Linear(2, 1)

        trainer = Trainer()
        optimizer = tether.Optimizer(trainer.model, optax.sgd(1.0))
        new_trainer, new_optimizer = tether.clone((trainer, optimizer))
        before = new_trainer.model.weight
        new_optimizer.update({"weight": jnp.ones((1, 2))})
        np.testing.assert_allclose(new_trainer.model.weight, before - 1, rtol=1e-6)

    def test_an_optimizer_by_itself_refuses(self):
        model = nn.Linear(2, 1)
        alone = tether.clone(tether.Optimizer(model, optax.sgd(1.0)))
        with pytest.raises(OptimizerError, match="copy"):
            alone.update({"weight": jnp.ones((1, 2))})
