# SPDX-License-Identifier: Apache-2.0
"""Tools that look at values leave them as they are, and see what plain JAX computes."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import debug
from tether.errors import CheckError

X = jnp.asarray([0.0, 4.0])

WAYS = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "hessian": jax.hessian,
    "grad of scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x)[0]),
    "tether.jit of tether.grad": lambda f: tether.jit(tether.grad(f)),
    "tether.jit of vmap of grad": lambda f: tether.jit(tether.vmap(tether.grad(f))),
    "tether.grad of checkpoint": lambda f: tether.jit(tether.grad(tether.checkpoint(f))),
}


class TestBackwardNan:
    @pytest.mark.parametrize("way", WAYS)
    def test_gradient_is_that_without_it(self, way, capsys):
        f = lambda x: jnp.sin(x).sum() ** 2
        got = WAYS[way](lambda x: f(debug.backward_nan(x, "x")))(X)
        np.testing.assert_allclose(got, WAYS[way](f)(X), rtol=1e-6)
        assert capsys.readouterr().out.startswith("x:\n  value:    array(")

    @pytest.mark.parametrize("way", WAYS)
    def test_nan_raises(self, way):
        f = lambda x: (0 * jnp.sqrt(debug.backward_nan(x, "x"))).sum()
        with pytest.raises((RuntimeError, ValueError), match="backward_nan: the gradient of x has a NaN"):
            jax.block_until_ready(WAYS[way](f)(X))

    def test_what_is_printed(self, capsys):
        f = lambda x: (3 * debug.backward_nan(x**2, "square")).sum()
        assert float(jax.jit(jax.grad(f))(2.0)) == 12.0
        said = "square:\n  value:    array(4., dtype=float32)\n  gradient: array(3., dtype=float32)\n"
        assert capsys.readouterr().out == said

    def test_lanes_are_one_array(self, capsys):
        jax.vmap(jax.grad(lambda x: 3 * debug.backward_nan(x)))(X)
        said = "a value:\n  value:    array([0., 4.], dtype=float32)\n  gradient: array([3., 3.], dtype=float32)\n"
        assert capsys.readouterr().out == said

    def test_nan_may_go_on(self, capsys):
        f = lambda x: (0 * jnp.sqrt(debug.backward_nan(x, terminate=False))).sum()
        assert np.isnan(tether.jit(tether.grad(f))(X)).tolist() == [True, False]
        assert "nan" in capsys.readouterr().out

    def test_tree_with_other_leaves(self):
        tree = {"x": X, "count": jnp.arange(3), "name": "text", "none": None}
        f = lambda x: debug.backward_nan(tree | {"x": x})["x"].sum()
        assert jax.grad(f)(X).tolist() == [1, 1]
        assert debug.backward_nan(tree)["count"] is tree["count"]

    def test_error_says_where_the_value_was(self):
        class Net(tether.Module):
            def __call__(self, x):
                return (0 * jnp.sqrt(debug.backward_nan(x, "x"))).sum()

        with pytest.raises(CheckError, match=r"at:       the module itself  \(Net\), .*test_debug.py:\d+$"):
            tether.jit(tether.grad(Net()))(X)

    def test_environment_counts(self, monkeypatch):
        monkeypatch.setenv("TETHER_ON_ERROR", "off")
        assert np.isnan(jax.grad(lambda x: 0 * jnp.sqrt(debug.backward_nan(x)))(0.0))


class TestBreakpointIf:
    WAYS = {
        "eager": lambda f: f,
        "jit": jax.jit,
        "tether.jit": tether.jit,
        "grad": lambda f: jax.grad(lambda x: f(x).sum()),
        "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, x[None])[1],
        "cond": lambda f: lambda x: jax.lax.cond(x.sum() < 1000, f, lambda x: x, x),
        "vmap over other lanes": lambda f: lambda x: jax.vmap(lambda _: f(x))(jnp.ones(1)),
    }

    @pytest.mark.parametrize("way", WAYS)
    def test_opens_where_pred_is_true(self, way):
        shown = io.StringIO()

        def f(x):
            debug.breakpoint_if(x > 4, backend="cli", stdin=io.StringIO("c\nc\n"), stdout=shown)
            return x

        run = self.WAYS[way](f)
        jax.block_until_ready(run(X))
        jax.effects_barrier()
        assert shown.getvalue() == ""
        jax.block_until_ready(run(X + 1))
        jax.effects_barrier()
        assert shown.getvalue().count("Entering jdb") == 1

    def test_any_lane_is_enough(self):
        shown = io.StringIO()

        def f(x):
            debug.breakpoint_if(x > 3, backend="cli", stdin=io.StringIO("c\nc\n"), stdout=shown, num_frames=1)
            return x

        jax.jit(jax.vmap(f))(X)
        jax.effects_barrier()
        assert "Entering jdb" in shown.getvalue()
        assert "select_n" not in str(jax.make_jaxpr(jax.vmap(f))(X))


class TestAnnounceTransform:
    def said(self, transform, x=X):
        lines: list[str] = []
        f = lambda x: debug.announce_transform(x, "x", announce=lines.append)
        jax.block_until_ready(transform(f)(x))
        return lines

    @pytest.mark.parametrize(
        ("transform", "said"),
        [
            (lambda f: f, "x: float32[2] in no transformation"),
            (jax.jit, "x: float32[2] in jax.jit"),
            (tether.jit, "x: float32[2] in tether.jit"),
            (jax.vmap, "x: float32[] in jax.vmap"),
            (lambda f: tether.jit(tether.vmap(tether.grad(f))), "x: float32[] in tether.jit, tether.vmap, tether.grad"),
            (lambda f: tether.jit(jax.vmap(f)), "x: float32[] in tether.jit, jax.vmap"),
            (lambda f: jax.vmap(tether.jit(f)), "x: float32[] in jax.vmap, tether.jit"),
            (lambda f: lambda x: tether.scan(lambda c, x: (c, f(x)), 0.0, x), "x: float32[] in tether.scan"),
            (
                lambda f: tether.jit(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, x)),
                "x: float32[] in tether.jit, jax.lax.scan",
            ),
            (lambda f: lambda x: jax.jvp(f, (x,), (x,)), "x: float32[2] in jax.grad"),
        ],
    )
    def test_transformations_from_the_outermost(self, transform, said):
        assert self.said(transform) == [said]

    def test_a_value_from_outside_goes_through_none(self):
        assert self.said(lambda f: lambda x: jax.jit(lambda y: f(x) + y)(x)) == ["x: float32[2] in no transformation"]

    def test_once_for_each_trace(self):
        lines: list[str] = []
        f = tether.jit(lambda x: debug.announce_transform(x, announce=lines.append))
        for x in (X, X, jnp.ones(3)):
            f(x)
        assert lines == ["a value: float32[2] in tether.jit", "a value: float32[3] in tether.jit"]

    def test_leaves_of_a_tree(self, capsys):
        tree = {"a": X, "b": [3, "text"], "net": tether.nn.Linear(2, 2)}
        assert debug.announce_transform(tree) is tree
        assert capsys.readouterr().out == "a value['a']: float32[2] in no transformation\n"
