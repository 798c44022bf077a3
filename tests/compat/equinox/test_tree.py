# SPDX-License-Identifier: Apache-2.0
"""Surgery on Equinox's modules, the errors that old handlers wait for, and inference flags."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether.compat.equinox as eqx


class Layer(eqx.Module):
    weight: Any
    parts: Any
    inference: bool = False
    name: str = eqx.static_field(default="layer")


class Plain(eqx.Module):
    inner: Any


def is_none(node: Any) -> bool:
    return node is None


class TestTreeAt:
    def test_a_field(self):
        layer = Layer(jnp.ones(2), [1, 2], name="mine")
        out = eqx.tree_at(lambda m: m.weight, layer, 5)
        assert (out.weight, out.parts, out.name) == (5, [1, 2], "mine")
        assert out.parts is not layer.parts and layer.weight.shape == (2,)

    def test_nodes_and_sequences_of_nodes(self):
        layer = Layer(1, [Plain(2), Plain(3)])
        assert eqx.tree_at(lambda m: m.parts, layer, "all").parts == "all"
        out = eqx.tree_at(lambda m: [part.inner for part in m.parts], layer, replace_fn=lambda x: x * 10)
        assert [part.inner for part in out.parts] == [20, 30]
        assert eqx.tree_at(lambda m: tuple(m.parts), layer, [4, 5]).parts == [4, 5]

    def test_none_by_is_leaf(self):
        assert eqx.tree_at(lambda m: m.weight, Layer(None, None), 1, is_leaf=is_none).weight == 1
        with pytest.raises(ValueError, match="several places"):
            eqx.tree_at(lambda m: m.weight, Layer(None, None), 1)

    def test_no_constructor_runs(self):
        class Once(eqx.Module):
            x: int

            def __init__(self, x: int):
                assert x == 1
                self.x = x

        assert eqx.tree_at(lambda m: m.x, Once(1), 2).x == 2

    def test_a_number_for_a_sequence_is_a_type_error_in_full(self):
        with pytest.raises(TypeError) as caught:
            eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], replace=4)
        assert str(caught.value) == (
            "tree_at: where returned a sequence, and replace is none of the same length.\n"
            "  got:      4\n"
            "  expected: a sequence of 2\n"
            "  fix:      one of\n"
            "    1. give one new value for each node\n"
            "    2. replace_fn=lambda old: new"
        )

    @pytest.mark.parametrize(
        ("where", "options", "match"),
        [
            (lambda t: (t[0], t[1]), {"replace": (1, 2, 3)}, "replace is none of the same length"),
            (lambda t: t[0], {}, "exactly one of replace and replace_fn"),
            (lambda t: t[0], {"replace": 1, "replace_fn": lambda x: x}, "exactly one of replace and replace_fn"),
            (lambda t: 7, {"replace": 1}, "no node of the tree"),
            (lambda t: t[0] if t[0] > 0 else t[1], {"replace": 1}, "looks at the value of a leaf"),
        ],
    )
    def test_everything_else_is_a_value_error(self, where: Any, options: Any, match: str):
        with pytest.raises(ValueError, match=match):
            eqx.tree_at(where, [1, 2], **options)

    def test_an_error_of_the_users_own_stays(self):
        with pytest.raises(KeyError, match="mine"):
            eqx.tree_at(lambda t: t["mine"], {"a": 1}, 2)


def test_tree_equal_is_the_equality_of_modules():
    one, two = Layer(jnp.ones(2), [1]), Layer(jnp.ones(2), [1])
    assert eqx.tree_equal(one, two) and one == two
    assert one != Layer(jnp.zeros(2), [1])
    assert eqx.tree_equal(one, Layer(jnp.ones(2), [1], name="other")) is False
    traced = jax.jit(lambda a, b: eqx.tree_equal(a, b))(Plain(jnp.ones(2)), Plain(jnp.ones(2)))
    assert isinstance(traced, jax.Array) and traced


class TestInference:
    def test_every_flag_below(self):
        model = Plain([Layer(1, [Layer(2, None)]), {"a": Layer(3, Plain(Layer(4, None)), inference=True)}])
        out = eqx.tree_inference(model, True)
        flags = [node.inference for node in (out.inner[0], out.inner[0].parts[0], out.inner[1]["a"])]
        assert flags == [True] * 3 and out.inner[1]["a"].parts.inner.inference is True
        assert model.inner[0].inference is False
        assert eqx.tree_equal(eqx.tree_inference(out, False), eqx.tree_inference(model, False)) is True

    def test_a_flag_of_the_root_and_none_at_all(self):
        assert eqx.tree_inference(Layer(1, 2), True).inference is True
        assert eqx.tree_inference(Plain(1), True) == Plain(1)

    def test_what_is_compiled_goes_by_the_flag_it_saw(self):
        with pytest.raises(RuntimeError) as caught:
            jax.jit(lambda layer: eqx.tree_inference(layer, True).weight)(Layer(1.0, None))
        assert str(caught.value) == (
            "tree_inference: inference flags can't be set inside a compiled function.\n"
            "  fix:      model = eqx.tree_inference(model, value) before the call, and the model as an argument of it"
        )
        assert jax.grad(lambda w: eqx.tree_inference(Layer(w, None), True).weight * 2)(1.0) == 2
