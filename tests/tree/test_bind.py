# SPDX-License-Identifier: Apache-2.0
"""bind: other values in a view; update: in place, all or nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import DtypeError, SelectionError, ShapeError, StructureError, TetherError

W = np.arange(6, dtype=np.float32).reshape(3, 2)


def state(model: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(model)]


class Tied(tether.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = tether.cell(self.a, "weight")


class TestBind:
    def test_named_cells_have_other_values_and_the_rest_is_shared(self):
        linear = nn.Linear(2, 3)
        before = state(linear)
        bound = tether.bind(linear, {"weight": jnp.asarray(W)})
        assert bound.weight.tolist() == W.tolist()
        assert tether.cell(bound, "bias") is tether.cell(linear, "bias")
        bound.weight = jnp.zeros((3, 2))
        assert state(linear) == before
        bound.bias = jnp.ones(3)
        assert linear.bias.tolist() == [1, 1, 1]

    @pytest.mark.parametrize("value", [W, W.astype(np.float64), W.tolist(), jnp.asarray(W), W.astype(np.int32)])
    def test_values_become_arrays(self, value: Any):
        bound = tether.bind(nn.Linear(2, 3), {"weight": value})
        assert isinstance(bound.weight, jax.Array) and bound.weight.dtype == jnp.float32
        assert bound.weight.tolist() == W.tolist()

    def test_other_float_dtypes_are_kept(self):
        bound = tether.bind(
            nn.Linear(2, 3), {"weight": jnp.asarray(W, jnp.bfloat16), "bias": jnp.zeros(3, jnp.float16)}
        )
        assert (bound.weight.dtype, bound.bias.dtype) == (jnp.bfloat16, jnp.float16)

    def test_writes_to_shared_state_land_in_the_model(self):
        norm = nn.BatchNorm(2, decay=0.5)
        tether.bind(norm, {"weight": jnp.ones(2)})(jnp.full((4, 2), 2.0))
        assert norm.mean.tolist() == [1, 1]

    def test_by_a_module_with_none_for_the_rest(self):
        linear = nn.Linear(2, 3)
        values = tether.filter(jax.tree.map(lambda x: x * 0 + 7, linear), "bias")
        bound = tether.bind(linear, values)
        assert bound.bias.tolist() == [7, 7, 7]
        assert tether.cell(bound, "weight") is tether.cell(linear, "weight")

    def test_under_plain_grad_of_the_values(self):
        """MAML's inner step, a hypernetwork: d/dw of sum((x w^T)^2) = 2 (x w^T)^T x."""
        linear = nn.Linear(2, 3, use_bias=False)
        x = np.asarray([[1.0, 2.0]], np.float32)
        f = lambda w: (tether.bind(linear, {"weight": w})(x) ** 2).sum()
        expected = 2 * (x @ W.T).T @ x
        np.testing.assert_allclose(jax.grad(f)(jnp.asarray(W)), expected, rtol=1e-6)
        np.testing.assert_allclose(tether.grad(f)(jnp.asarray(W)), expected, rtol=1e-6)
        np.testing.assert_allclose(
            jax.vmap(f)(jnp.stack([W, 2 * W])), [np.sum((x @ W.T) ** 2), 4 * np.sum((x @ W.T) ** 2)]
        )

    def test_tied_cells_are_bound_together(self):
        bound = tether.bind(Tied(), {"b.weight": jnp.zeros((2, 2))})
        assert bound.a.weight.tolist() == [[0, 0], [0, 0]]
        assert tether.cell(bound, "a.weight") is tether.cell(bound, "b.weight")

    @pytest.mark.parametrize(
        ("values", "error"),
        [
            ({"wieght": W}, SelectionError),
            ({"weight": W.T}, ShapeError),
            ({"weight": 1.0}, ShapeError),
            ({"weight": W * 1j}, DtypeError),
            (nn.BatchNorm(2), StructureError),
            (3, StructureError),
            ([W], StructureError),
        ],
    )
    def test_refused(self, values: Any, error: type[Exception]):
        linear = nn.Linear(2, 3)
        before = state(linear)
        with pytest.raises(error):
            tether.bind(linear, values)
        assert state(linear) == before

    def test_two_values_for_one_cell_are_refused(self):
        with pytest.raises(StructureError, match="two values") as caught:
            tether.bind(Tied(), {"a.weight": jnp.zeros((2, 2)), "b.weight": jnp.ones((2, 2))})
        assert caught.value.at == "a.weight and b.weight, which are tied"


class TestUpdate:
    def test_in_place(self):
        linear = nn.Linear(2, 3)
        cell = tether.cell(linear, "weight")
        report = tether.update(linear, {"weight": W})
        assert (report.updated, report.missing, report.unexpected) == (("weight",), ("bias",), ())
        assert cell.value.tolist() == W.tolist()

    def test_of_a_module(self):
        a, b = nn.Linear(2, 3), nn.Linear(2, 3)
        assert tether.update(a, b).missing == ()
        assert state(a) == state(b)
        b.bias = b.bias + 1
        assert state(a) != state(b)

    @pytest.mark.parametrize(
        ("values", "error"),
        [
            ({"bias": jnp.ones(3), "weight": W.T}, ShapeError),
            ({"bias": jnp.ones(3), "weight": W * 1j}, DtypeError),
            ({"bias": jnp.ones(3), "nothing": W}, SelectionError),
            (nn.BatchNorm(2), StructureError),
            (3, StructureError),
        ],
    )
    def test_all_or_nothing(self, values: Any, error: type[Exception]):
        linear = nn.Linear(2, 3)
        before = state(linear)
        with pytest.raises(error):
            tether.update(linear, values)
        assert state(linear) == before

    def test_not_strict_reports(self):
        linear = nn.Linear(2, 3)
        report = tether.update(linear, {"bias": jnp.ones(3), "weight": W.T, "nothing": 1}, strict=False)
        assert (report.updated, report.missing) == (("bias",), ("weight",))
        assert set(report.unexpected) == {"weight", "nothing"}
        assert linear.bias.tolist() == [1, 1, 1]

    def test_inside_jit(self):
        linear = nn.Linear(2, 3)
        f = tether.jit(lambda m, w: len(tether.update(m, {"weight": w * 2}).updated))
        assert f(linear, jnp.asarray(W)) == 1
        assert linear.weight.tolist() == (2 * W).tolist()

    def test_loads_a_constant(self):
        class Table(tether.Module):
            def __init__(self):
                self.table = tether.Constant(jnp.zeros(2))

        table = Table()
        with pytest.raises(TetherError):
            table.table = jnp.ones(2)
        tether.update(table, {"table": jnp.ones(2)})
        assert table.table.tolist() == [1, 1]
