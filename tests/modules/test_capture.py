# SPDX-License-Identifier: Apache-2.0
"""capture, tap and intercept against the same computation written out in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, SelectionError, ShapeError

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], np.float32)


class Cell(tether.Module):
    """h = tanh(linear(h)); its inside has a name, too."""

    def __init__(self, seed):
        self.linear = nn.Linear(3, 3, key=jax.random.key(seed))
        self.calls = tether.State(0)

    def __call__(self, h):
        self.calls = self.calls + 1
        return jnp.tanh(tether.tap("before", self.linear(h)))


class Log:
    """Compared by identity, so that a function that holds it stays the same function."""

    def __init__(self):
        self.entries = []


def linear_by_hand(cell, h):
    return h @ cell.linear.weight.T + cell.linear.bias[None]


def inner_by_hand(cell, h, turns):
    """Values before tanh, turn by turn, and the end."""
    found = []
    for _ in range(turns):
        found.append(linear_by_hand(cell, h))
        h = jnp.tanh(found[-1])
    return h, jnp.stack(found)


def wrapped(f):
    return lambda *args: f(*args)


@pytest.fixture
def cell():
    return Cell(0)


class TestCapture:
    @pytest.mark.parametrize("select", ["linear", nn.Linear, "before", ["linear", "before"], "l*"])
    @pytest.mark.parametrize("around", [wrapped, tether.jit, tether.checkpoint], ids=["eager", "jit", "checkpoint"])
    def test_names(self, cell, select, around):
        right = linear_by_hand(cell, X)
        f = around(lambda x: cell(x))
        for calls in (1, 2):
            y, seen = tether.capture(f, select)(X)
            assert set(seen) == (
                {"linear", "before"} if isinstance(select, list) else {"before" if select == "before" else "linear"}
            )
            for value in seen.values():
                np.testing.assert_allclose(value, right, rtol=1e-5)
            np.testing.assert_allclose(y, jnp.tanh(right), rtol=1e-5)
            assert int(cell.calls) == calls
        y = f(X)  # and nothing is left behind
        np.testing.assert_allclose(y, jnp.tanh(right), rtol=1e-5)

    def test_by_module_and_by_class_of_itself(self, cell):
        for select in (cell.linear, Cell):
            _, seen = tether.capture(cell.eval(), select)(X)
            assert list(seen) == ["linear" if select is cell.linear else ""]

    @pytest.mark.parametrize("jitted", [False, True])
    def test_stacks(self, cell, jitted):
        def f(x):
            scanned = tether.scan(lambda h, _: (cell(h), None), x, length=3)[0]
            return tether.vmap(cell)(scanned)

        h, inner = inner_by_hand(cell, jnp.asarray(X), 3)
        structure = jax.tree.structure(cell)
        capture = tether.capture(tether.jit(f) if jitted else f, "linear")
        for _ in range(2):
            y, seen = capture(X)
            assert set(seen) == {"linear", "linear#2"}
            np.testing.assert_allclose(seen["linear"], inner, rtol=1e-5)
            np.testing.assert_allclose(seen["linear#2"], linear_by_hand(cell, h), rtol=1e-5)
            np.testing.assert_allclose(y, jnp.tanh(seen["linear#2"]), rtol=1e-5)
        assert jax.tree.structure(cell) == structure

    def test_scan_of_vmap_in_grad_in_jit(self, cell):
        def loss(x):
            return tether.scan(lambda h, _: (tether.vmap(cell)(h), None), x, length=2)[0].sum()

        right, inner = inner_by_hand(cell, jnp.asarray(X), 2)
        gradient, seen = tether.jit(tether.capture(tether.grad(loss), "linear"))(jnp.asarray(X))
        np.testing.assert_allclose(seen["linear"], inner, rtol=1e-5)
        by_hand = jax.grad(lambda x: inner_by_hand(cell, x, 2)[0].sum())(jnp.asarray(X))
        np.testing.assert_allclose(gradient, by_hand, rtol=1e-4, atol=1e-6)
        assert int(cell.calls) == 2

    def test_stacked_layers(self):
        cells = tether.stack([Cell(0), Cell(1)])
        _, seen = tether.capture(lambda x: tether.scan(lambda h, cell: (cell(h), None), x, cells)[0], "linear")(X)
        first = linear_by_hand(tether.index(cells, 0), X)
        np.testing.assert_allclose(seen["linear"][0], first, rtol=1e-5)
        np.testing.assert_allclose(
            seen["linear"][1], linear_by_hand(tether.index(cells, 1), jnp.tanh(first)), rtol=1e-5
        )

    def test_untaken_branch_gives_zeros(self, cell):
        f = lambda p, x: tether.cond(p, lambda x: cell(x), lambda x: tether.tap("other", x), x)
        jitted = tether.jit(f)
        for call in (f, jitted):
            for p in (True, False):
                _, seen = tether.capture(call, ["linear", "other"])(jnp.asarray(p), X)
                np.testing.assert_allclose(seen["linear"], float(p) * linear_by_hand(cell, X), rtol=1e-5)
                np.testing.assert_allclose(seen["other"], float(not p) * X, rtol=1e-5)

    def test_loops_that_stack_nothing_refuse(self, cell):
        f = lambda x: tether.fori_loop(0, 2, lambda i, h: cell(h), x)
        with pytest.raises(ArgumentError, match=r"(?s)captured in a loop.*linear.*tether\.scan"):
            tether.capture(f, "linear")(X)
        assert int(cell.calls) == 0
        f(X)
        assert int(cell.calls) == 2

    def test_trees_of_values_and_nested_captures(self, cell):
        f = lambda x: tether.tap("pair", {"a": x, "b": (cell(x), x.sum())})["a"]
        (y, inner), outer = tether.capture(tether.capture(f, "pair"), "linear")(X)
        assert set(inner) == {"pair"} and set(outer) == {"linear"}
        np.testing.assert_allclose(inner["pair"]["b"][1], X.sum(), rtol=1e-6)
        np.testing.assert_allclose(outer["linear"], linear_by_hand(cell, X), rtol=1e-5)

    def test_under_disable_jit(self, cell):
        f = tether.jit(lambda x: tether.scan(lambda h, _: (cell(h), None), x, length=3)[0])
        with jax.disable_jit():
            _, seen = tether.capture(f, "linear")(X)
        np.testing.assert_allclose(seen["linear"], inner_by_hand(cell, X, 3)[1], rtol=1e-5)

    def test_error_inside_leaves_nothing(self, cell):
        def f(x):
            cell(x)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            tether.capture(f, "linear")(X)
        assert tether.tap("linear", 3) == 3 and int(tether.capture(cell, "linear")(X)[0].size) == 6

    def test_nothing_named_so(self, cell):
        for select, add in (("lienar", None), ("linear", {"befour": X})):
            with pytest.raises(SelectionError, match=r"(?s)(lienar|befour).*linear"):
                tether.capture(cell, select, add)(X)
        with pytest.raises(SelectionError, match="Param"):
            tether.capture(cell, tether.Param)(X)
        with pytest.raises(ArgumentError, match="callable"):
            tether.capture(3, "linear")


class TestAdd:
    @pytest.mark.parametrize("jitted", [False, True])
    def test_gradient_at_an_inner_value(self, cell, jitted):
        f = tether.jit(cell) if jitted else cell
        loss = lambda eps: (tether.capture(f, "linear", add={"linear": eps})(X)[0] ** 2).sum()
        by_hand = lambda eps: (jnp.tanh(linear_by_hand(cell, X) + eps) ** 2).sum()
        for eps in (np.zeros_like(X), np.float32(0.5) * X):
            np.testing.assert_allclose(tether.grad(loss)(eps), jax.grad(by_hand)(eps), rtol=1e-4, atol=1e-6)
            assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cell))

    def test_each_turn_and_lane_has_its_own(self, cell):
        def f(x):
            return tether.scan(lambda h, _: (tether.vmap(cell)(h), None), x, length=3)[0]

        def by_hand(eps):
            h = jnp.asarray(X)
            for row in eps:
                h = jnp.tanh(linear_by_hand(cell, h) + row)
            return h.sum()

        eps = 0.1 * np.arange(18, dtype=np.float32).reshape(3, 2, 3)
        loss = lambda eps: tether.capture(f, "linear", add={"linear": eps})(X)[0].sum()
        value, gradient = tether.value_and_grad(loss)(eps)
        right, right_gradient = jax.value_and_grad(by_hand)(eps)
        np.testing.assert_allclose(value, right, rtol=1e-5)
        np.testing.assert_allclose(gradient, right_gradient, rtol=1e-4, atol=1e-6)

    def test_wrong_shape_and_structure(self, cell):
        with pytest.raises(ShapeError, match=r"(?s)linear.*float32\[3\].*float32\[2, 3\]"):
            tether.capture(cell, "linear", add={"linear": np.zeros(3, np.float32)})(X)
        with pytest.raises(ArgumentError, match="structure"):
            tether.capture(cell, "linear", add={"linear": [X]})(X)
        assert int(cell.calls) == 0 or int(cell.calls) == 2  # an eager call had begun


class TestIntercept:
    @pytest.mark.parametrize("around", [wrapped, tether.jit], ids=["eager", "jit"])
    def test_replaces_and_restores(self, cell, around):
        f = around(lambda x: tether.scan(lambda h, _: (cell(h), None), x, length=2)[0])
        right = inner_by_hand(cell, X, 2)[0]
        np.testing.assert_allclose(f(X), right, rtol=1e-5)
        skipped = tether.intercept(f, "linear", lambda path, call, x: x)
        np.testing.assert_allclose(skipped(X), np.tanh(np.tanh(X)), rtol=1e-5)
        doubled = tether.intercept(f, nn.Linear, lambda path, call, x: 2 * call(x))
        np.testing.assert_allclose(
            doubled(X), jnp.tanh(2 * linear_by_hand(cell, jnp.tanh(2 * linear_by_hand(cell, X)))), rtol=1e-5
        )
        np.testing.assert_allclose(f(X), right, rtol=1e-5)

    def test_order_paths_and_state_of_the_function(self, cell):
        log, scale = Log(), tether.State(3.0)

        def outer(path, call, *args, **kwargs):
            log.entries.append(("outer", path))
            return call(*args, **kwargs) * scale.value

        def inner(path, call, *args, **kwargs):
            log.entries.append(("inner", path))
            return call(*args, **kwargs) + 1

        f = tether.jit(cell)
        both = tether.intercept(tether.intercept(f, "linear", inner), "linear", outer)
        right = lambda s: np.tanh((linear_by_hand(cell, X) + 1) * s)
        np.testing.assert_allclose(both(X), right(3), rtol=1e-5)
        assert log.entries == [("outer", "linear"), ("inner", "linear")]
        scale.value = 2.0  # read by the compiled program, not baked in
        np.testing.assert_allclose(both(X), right(2), rtol=1e-5)
        assert len(log.entries) == 2
        with pytest.raises(ArgumentError, match="callable"):
            tether.intercept(f, "linear", None)
