# SPDX-License-Identifier: Apache-2.0
"""Sequential, Lambda, Identity, Flatten."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError


@pytest.fixture
def model(key: jax.Array) -> nn.Sequential:
    k1, k2 = jax.random.split(key)
    return nn.Sequential([nn.Linear(3, 4, key=k1), nn.Lambda(jax.nn.relu), nn.Dropout(0.5), nn.Linear(4, 2, key=k2)])


class TestSequential:
    def test_values(self, model: nn.Sequential):
        x = np.random.default_rng(0).normal(size=(5, 3))
        hidden = np.maximum(x @ np.asarray(model[0].weight, np.float64).T + np.asarray(model[0].bias), 0)
        wanted = hidden @ np.asarray(model[3].weight, np.float64).T + np.asarray(model[3].bias)
        np.testing.assert_allclose(model(x, training=False), wanted, rtol=1e-5, atol=1e-6)

    def test_paths_have_no_name_between(self, model: nn.Sequential):
        assert list(tether.variables(model)) == ["[0].weight", "[0].bias", "[3].weight", "[3].bias"]
        nested = nn.Sequential([model, nn.Identity()])
        assert list(tether.variables(nested)) == ["[0][0].weight", "[0][0].bias", "[0][3].weight", "[0][3].bias"]

    def test_is_a_sequence(self, model: nn.Sequential):
        assert len(model) == 4
        assert [type(layer).__name__ for layer in model] == ["Linear", "Lambda", "Dropout", "Linear"]
        assert model[-1] is model[3]
        assert model[1].fn is jax.nn.relu
        with pytest.raises(IndexError):
            model[4]

    def test_a_slice_shares_its_layers(self, model: nn.Sequential):
        head = model[:2]
        assert isinstance(head, nn.Sequential)
        assert len(head) == 2
        model[0].bias = jnp.full(4, -100.0)
        assert head(jnp.zeros(3)).tolist() == [0, 0, 0, 0]
        assert list(tether.variables(model)) == ["[0].weight", "[0].bias", "[3].weight", "[3].bias"]

    def test_a_slice_of_a_view_keeps_the_mode(self, model: nn.Sequential):
        tail = model.eval()[2:]
        np.testing.assert_array_equal(tail(jnp.ones(4)), tail(jnp.ones(4)))
        np.testing.assert_array_equal(model[2:3].eval()(jnp.ones(9)), np.ones(9))

    def test_layers_may_come_from_any_iterable(self):
        assert len(nn.Sequential(nn.Identity() for _ in range(3))) == 3
        assert len(nn.Sequential((nn.Identity(),))) == 1

    def test_one_layer_twice_is_one_layer(self, key: jax.Array):
        linear = nn.Linear(2, 2, key=key)
        model = nn.Sequential([linear, linear])
        assert list(tether.variables(model)) == ["[0].weight", "[0].bias"]
        assert len(jax.tree.leaves(model)) == 2
        x = np.asarray([1.0, -1.0])
        once = np.asarray(linear.weight, np.float64) @ x + np.asarray(linear.bias)
        wanted = np.asarray(linear.weight, np.float64) @ once + np.asarray(linear.bias)
        np.testing.assert_allclose(model(x), wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("layers", "message", "fix"),
        [
            ([], "there are no layers", "nn.Identity()"),
            ([jnp.tanh], "layer 0 is not a Module", "nn.Lambda(tanh) around a function"),
            ([nn.Identity(), lambda x: x], "layer 1 is not a Module", "nn.Lambda(<lambda>) around a function"),
            ([nn.Identity], "layer 0 is not a Module", "make one: Identity(...)"),
            ([[nn.Identity()]], "layer 0 is not a Module", "nn.Sequential([...]) around the inner list"),
            (nn.Identity(), "layers is not a list", "nn.Sequential([first, second])"),
            (3, "layers is not a list", "nn.Sequential([first, second])"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_wrong_layers(self, layers, message: str, fix: str):
        with pytest.raises(ArgumentError) as caught:
            nn.Sequential(layers)
        assert caught.value.what == f"Sequential: {message}."
        assert caught.value.fixes == [fix]
        assert caught.value.got and caught.value.expected

    def test_a_sequential_is_no_list_of_layers(self, model: nn.Sequential):
        with pytest.raises(ArgumentError, match="layers is not a list"):
            nn.Sequential(model)

    def test_an_error_names_the_layer_by_its_path(self, model: nn.Sequential):
        with pytest.raises(ShapeError) as caught:
            nn.Sequential([nn.Identity(), model])(jnp.ones(4))
        assert caught.value.at == "[1][0]  (Linear)"


class TestLambda:
    def test_calls_the_function(self):
        assert nn.Lambda(lambda h: h.mean((-2, -1)))(jnp.ones((2, 3, 4, 4))).shape == (2, 3)

    def test_equal_functions_make_equal_structures(self):
        first, second = (nn.Lambda(lambda h: h * 2) for _ in range(2))
        assert jax.tree.structure(first) == jax.tree.structure(second)
        assert jax.tree.structure(first) != jax.tree.structure(nn.Lambda(lambda h: h * 3))

    @pytest.mark.parametrize("fn", [None, 3, nn.Identity], ids=str)
    def test_wrong_function(self, fn):
        with pytest.raises(ArgumentError, match="Lambda: fn is not a plain function"):
            nn.Lambda(fn)

    def test_a_module_needs_no_lambda(self):
        with pytest.raises(ArgumentError, match="Lambda: fn is not a plain function") as caught:
            nn.Lambda(nn.Identity())
        assert caught.value.fixes == ["put a Module itself where the Lambda would stand"]


def test_identity_gives_back_the_very_object():
    thing = object()
    assert nn.Identity()(thing) is thing


class TestFlatten:
    @pytest.mark.parametrize(
        ("dims", "shape", "wanted"),
        [
            ((-3,), (8, 3, 4, 5), (8, 60)),
            ((-3,), (3, 4, 5), (60,)),
            ((-3,), (2, 0, 3, 4, 5), (2, 0, 60)),
            ((-3, -2), (8, 3, 4, 5), (8, 12, 5)),
            ((1,), (8, 3, 4, 5), (8, 60)),
            ((0, 1), (8, 3, 4), (24, 4)),
            ((-1,), (8, 3), (8, 3)),
        ],
        ids=str,
    )
    def test_values(self, dims: tuple, shape: tuple, wanted: tuple):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(nn.Flatten(*dims)(x), x.reshape(wanted))

    def test_has_no_default(self):
        with pytest.raises(ArgumentError) as caught:
            nn.Flatten()
        assert caught.value.what == "Flatten: start_dim is not an axis number."
        assert caught.value.fixes[0] == "nn.Flatten(-3) joins channels, height and width of each example"

    @pytest.mark.parametrize("dims", [(1.0,), (True,), (1, None), ("1",)], ids=str)
    def test_wrong_dims(self, dims):
        with pytest.raises(ArgumentError, match=r"Flatten: (start|end)_dim is not an axis number"):
            nn.Flatten(*dims)

    @pytest.mark.parametrize(
        ("dims", "shape"), [((-3,), (4, 5)), ((2,), (4, 5)), ((-1, -2), (4, 5)), ((0,), ())], ids=str
    )
    def test_input_without_the_axes(self, dims: tuple, shape: tuple):
        with pytest.raises(ShapeError, match=rf"Flatten: x has no axes {dims[0]} to ") as caught:
            nn.Flatten(*dims)(jnp.ones(shape))
        assert caught.value.got == f"float32[{', '.join(map(str, shape))}]"


class TestNamedSequential:
    def test_is_reached_by_name_and_by_place(self, key: jax.Array):
        model = nn.Sequential({"hidden": nn.Linear(3, 4, key=key), "relu": nn.Lambda(jax.nn.relu)})
        assert model["hidden"] is model[0] and model[-1] is model["relu"]
        assert (len(model), [type(layer).__name__ for layer in model]) == (2, ["Linear", "Lambda"])
        assert list(tether.variables(model)) == ["['hidden'].weight", "['hidden'].bias"]
        x = np.ones((2, 3), np.float32)
        np.testing.assert_allclose(model(x), np.maximum(model["hidden"](x), 0))
        head = model[:1]
        assert head["hidden"] is model[0] and len(head) == 1
        np.testing.assert_allclose(tether.jit(model)(x), model(x), rtol=1e-6)

    def test_the_order_is_that_of_the_dict(self):
        model = nn.Sequential({"b": nn.Lambda(lambda x: x + 1), "a": nn.Lambda(lambda x: x * 10)})
        assert float(model(jnp.ones(()))) == float(tether.clone(model)(jnp.ones(()))) == 20
        assert model[1] is model["a"] and float(model[:1](jnp.ones(()))) == 2

    def test_errors(self, key: jax.Array):
        with pytest.raises(ArgumentError, match=r"(?s)layer relu is not a Module.*nn.Lambda\(relu\)"):
            nn.Sequential({"relu": jax.nn.relu})
        with pytest.raises(ArgumentError, match="there are no layers"):
            nn.Sequential({})
        with pytest.raises(KeyError):
            nn.Sequential({"a": nn.Identity()})["b"]
        with pytest.raises(TypeError):
            nn.Sequential([nn.Identity()])["a"]


class TestResidual:
    def test_values(self, key: jax.Array):
        linear, other = nn.Linear(3, 3, key=key), nn.Linear(3, 2, key=key)
        x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
        np.testing.assert_allclose(nn.Residual(linear)(x), x + np.asarray(linear(x)), rtol=1e-6)
        both = nn.Residual(nn.Linear(3, 2, key=key), other)
        np.testing.assert_allclose(both(x), np.asarray(both.layer(x)) + np.asarray(other(x)), rtol=1e-6)

    def test_nothing_is_broadcast(self, key: jax.Array):
        with pytest.raises(ShapeError, match=r"(?s)Residual: the layer's result.*float32\[4, 1\].*float32\[4, 3\]"):
            nn.Residual(nn.Linear(3, 1, key=key))(jnp.ones((4, 3)))
        with pytest.raises(ArgumentError, match="Residual: layer 0 is not a Module"):
            nn.Residual(jax.nn.relu)
