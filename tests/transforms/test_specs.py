# SPDX-License-Identifier: Apache-2.0
"""Specs of arguments, results and Variables: prefix trees, explicit and automatic axes, nesting, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tether
from tests.transforms.shard_models import BLOCKS, GRID, LINE, SEEN_ONCE, Net, Total, X, spec_of
from tether import nn
from tether._transforms._specs import varying
from tether.errors import ArgumentError, SelectionError, ShapeError


class TestSpecs:
    def test_prefix_trees_static_parts_and_names(self):
        seen = []

        def f(net, batch, mode, flag, scale=1.0, *, shift=0.0):
            seen.append((mode, flag, batch["none"], type(scale)))
            x, pair = batch["x"], (batch["y"].sum(), jax.lax.pmean(batch["x"].sum(), "d"))
            return {"out": x * scale + shift, "parts": (net, pair[0][None], {"mean": pair[1]}), "none": None}

        net = Net()
        specs = {"x": P("d"), "y": P(), "none": P("d")}
        outs = {"out": P("d"), "parts": (P(), P("d"), P()), "none": None}
        call = tether.shard_map(f, mesh=LINE, in_specs=(None, specs, P(), None, P()), out_specs=outs)
        batch = {"x": X, "y": jnp.arange(3.0), "none": None}
        out = tether.jit(call, static_argnames="flag")(net, batch, "mode", ("a", 3), scale=2.0, shift=jnp.ones((1, 1)))
        np.testing.assert_allclose(out["out"], X * 2 + 1, rtol=1e-6)
        np.testing.assert_allclose(out["parts"][1], [3.0] * 4)
        np.testing.assert_allclose(out["parts"][2]["mean"], X.sum() / 4, rtol=1e-5)
        assert out["parts"][0] is net and out["none"] is None
        assert [s[:3] for s in seen] == [("mode", ("a", 3), None)]

    def test_module_made_inside(self):
        def make(key):
            layer = nn.Linear(3, 2, key=key[0])
            return layer, layer.weight

        outs = ({"weight": P("d"), "bias": P("d")}, P("d"))
        keys = jax.random.split(jax.random.key(0), 4)
        layer, weight = tether.jit(tether.shard_map(make, mesh=LINE, in_specs=P("d"), out_specs=outs))(keys)
        assert layer.weight.shape == (8, 3) and layer.bias.shape == (8,)
        np.testing.assert_array_equal(layer.weight, jnp.concatenate([nn.Linear(3, 2, key=k).weight for k in keys]))
        np.testing.assert_array_equal(layer.weight, weight)

    def test_decorator_module_call_and_options(self):
        @tether.jit
        @tether.shard_map(mesh=LINE, in_specs=P("d"), out_specs=P("d"))
        def f(x):
            """Words."""
            return x + 1

        np.testing.assert_array_equal(f(X), X + 1)
        assert (f.__name__, f.__doc__) == ("f", "Words.")
        norm = nn.BatchNorm(3, axis_name="d", channel_axis=1)
        call = tether.jit(tether.shard_map(norm, mesh=LINE, in_specs=P("d"), out_specs=P("d")))
        np.testing.assert_allclose(call(X, training=False), X / np.sqrt(1 + 1e-5), rtol=1e-5)
        assert float(jnp.abs(norm.mean).sum()) == 0
        right = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5)
        np.testing.assert_allclose(call(X), right, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(norm.mean, 0.1 * X.mean(0), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("context", [False, True], ids=["mesh", "context"])
    def test_explicit_axes(self, context):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        net, x = Net(), jax.device_put(X, NamedSharding(mesh, P("d")))
        states = {"seen": P("d")}
        if context:
            with jax.set_mesh(mesh):
                y = tether.jit(tether.shard_map(net, out_specs=P("d"), states=states))(x)
        else:
            y = tether.jit(tether.shard_map(net, mesh=mesh, in_specs=P("d"), out_specs=P("d"), states=states))(x)
        np.testing.assert_allclose(y, SEEN_ONCE, rtol=1e-5)
        np.testing.assert_allclose(net.seen, BLOCKS.sum(1), rtol=1e-5)
        assert (spec_of(tether.cell(net, "seen")), spec_of(tether.cell(net, "calls"))) == (P("d"), P())

    def test_axes_that_stay_automatic(self):
        net = Net()
        tether.place(net, NamedSharding(GRID, P(("i", "j"))), "seen")

        def f(x):
            net.calls = net.calls + 1
            net.seen = net.seen + x.sum() + jax.lax.axis_index("i").astype(x.dtype)
            return x

        f = tether.jit(tether.shard_map(f, mesh=GRID, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}))
        f(jnp.ones((4, 3)))
        np.testing.assert_array_equal(net.seen[:, 0], [6.0, 6.0, 7.0, 7.0])
        assert int(net.calls) == 1 and spec_of(tether.cell(net, "seen")) == P(("i", "j"))

    def test_shards_within_shards(self):
        net = Total()

        def inner(x):
            net.total = net.total + jax.lax.psum(x.sum(), "j")
            return x + jax.random.uniform(tether.random.draw(), x.shape)

        def outer(x):
            y = tether.shard_map(inner, in_specs=P("j"), out_specs=P("j"), axis_names={"j"})(x)
            net.total = jax.lax.psum(net.total, "i")
            return y

        f = tether.shard_map(outer, mesh=GRID, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
        out = tether.jit(f)(jnp.zeros(4))
        assert len(np.unique(out)) == 4 and float(net.total) == 2.0

    def test_within_vmap_checkpoint_and_grad(self):
        nets, calls = tether.stack([Total(), Total()]), tether.State(0)

        def f(net, x):
            calls.value = calls.value + 1
            net.total = net.total + jax.lax.psum(x.sum(), "d")
            return x * net.total

        f = tether.vmap(tether.checkpoint(tether.shard_map(f, mesh=LINE, in_specs=(None, P("d")), out_specs=P("d"))))
        scales = np.array([1.0, 2.0], np.float32)
        loss = lambda scales: f(nets, X[None] * scales[:, None, None]).sum()
        grads = tether.jit(tether.grad(loss))(scales)
        totals = 1 + scales * X.sum()
        np.testing.assert_allclose(nets.total, totals, rtol=1e-5)
        np.testing.assert_allclose(grads, X.sum() * (1 + 2 * scales * X.sum()), rtol=1e-4)
        assert int(calls.value) == 1 and calls.value.shape == ()

    def test_captured_values_have_a_row_for_each_shard(self):
        layer = nn.Linear(3, 2, key=jax.random.key(0))
        f = tether.shard_map(lambda x: jax.lax.pmean(layer(x), "d"), mesh=LINE, in_specs=P("d"), out_specs=P())
        _, seen = tether.jit(tether.capture(f, layer))(X)
        right = BLOCKS @ np.asarray(layer.weight).T + np.asarray(layer.bias)
        np.testing.assert_allclose(next(iter(seen.values())), right, rtol=1e-5)


class TestVarying:
    @pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
    def test_axes_along_which_values_differ(self, compiled):
        """What JAX tells of a value inside shard_map, by an attribute of its type that isn't documented."""
        found = []

        def f(x, key):
            found.append([varying(x), varying(jax.lax.psum(x, "i")), varying(jnp.ones(())), varying(key)])
            found.append(varying(jax.random.fold_in(key, jax.lax.axis_index("j"))))
            return x

        f = jax.shard_map(f, mesh=GRID, in_specs=(P("i"), P()), out_specs=P("i"))
        (jax.jit(f) if compiled else f)(jnp.ones(4), jax.random.key(0))
        assert found == [[{"i"}, set(), set(), set()], {"j"}]


def identity(x, y=1.0):
    return x


def mapped(f=identity, x=X, **options):
    return tether.shard_map(f, **{"mesh": LINE, "in_specs": P("d"), "out_specs": P("d"), **options})(x)


def on_one_device():
    layer = nn.Linear(3, 3)
    tether.place(layer, jax.devices()[0])
    return layer


ERRORS = {
    "mesh": (lambda: mapped(mesh=None), ArgumentError, "no mesh.*set_mesh"),
    "axis_names": (lambda: mapped(axis_names={"q"}), ArgumentError, r"axis_names.*\['q'\].*axis 'd'"),
    "axis": (lambda: mapped(in_specs=P("q")), ArgumentError, r"in_specs of x.*P\('q',\), with 'q'.*axis 'd'"),
    "axis of results": (lambda: mapped(out_specs=P("q")), ArgumentError, "at: *out_specs.*'q'"),
    "axis of a selection": (
        lambda: mapped(nn.Linear(3, 4), states={"weight": P("q")}),
        ArgumentError,
        "states, at 'weight'.*'q'",
    ),
    "size": (
        lambda: mapped(x=X[:6]),
        ShapeError,
        r"at: *x\n.*float32\[6, 3\], whose axis 0 is 6.*4, the size of axis 'd'",
    ),
    "size of two axes": (
        lambda: mapped(x=X[:6], mesh=GRID, in_specs=P(("i", "j")), out_specs=P("i")),
        ShapeError,
        "a multiple of 4, the size of axes 'i', 'j'",
    ),
    "size of a Variable": (
        lambda: mapped(nn.Linear(3, 3), states={tether.Param: P("d")}),
        ShapeError,
        r"weight  \(Param\).*float32\[3, 3\], whose axis 0 is 3",
    ),
    "rank": (lambda: mapped(in_specs=P("d", None, None)), ShapeError, r"float32\[8, 3\] and P.*at most 2 entries"),
    "rank of a number": (lambda: mapped(x=3.0), ShapeError, "float.* and P.*at most 0"),
    "no spec": (lambda: mapped(in_specs=("d",)), ArgumentError, r"no prefix.*at: *x\n.*'d' for float32\[8, 3\]"),
    "no prefix": (
        lambda: mapped(x={"b": X}, in_specs=({"a": P("d")},)),
        ArgumentError,
        r"at: *x\n.*\{'a': \*\} for \{'b': \*\}",
    ),
    "too many entries": (
        lambda: mapped(in_specs=(P("d"), P())),
        ArgumentError,
        r"identity\(x, y=1.0\).*tuple of 2 for 1",
    ),
    "None": (lambda: mapped(in_specs=None), ArgumentError, "None for 1 argument"),
    "no in_specs": (
        lambda: tether.shard_map(identity, mesh=LINE, out_specs=P())(X),
        ArgumentError,
        "in_specs is missing",
    ),
    "no prefix of the result": (
        lambda: mapped(lambda x: (x, x), out_specs=(P("d"),)),
        ArgumentError,
        r"result\n.*\(\*,\) for \(\*, \*\)",
    ),
    "a result that differs": (
        lambda: mapped(lambda x: {"loss": x.sum()}, out_specs=P()),
        ArgumentError,
        r"result\['loss'\].*float32\[\], another along axis 'd'.*pmean\(x, 'd'\)",
    ),
    "a number for each shard": (lambda: mapped(lambda x: x.sum()), ShapeError, r"float32\[\] and P.*x\[None\]"),
    "spec of a module": (
        lambda: mapped(lambda net: X, nn.Linear(3, 4), in_specs=("d",)),
        ArgumentError,
        r"net  \(Linear\).*'d'.*\{select: PartitionSpec\}",
    ),
    "no spec for a selection": (
        lambda: mapped(nn.Linear(3, 4), states={"weight": "d"}),
        ArgumentError,
        "'weight'.*'d'",
    ),
    "selection": (lambda: mapped(nn.Linear(3, 4), states={"wieght": P()}), SelectionError, "'wieght'.*'weight'"),
    "selection of nothing": (lambda: mapped(writes={"total": "mean"}), SelectionError, "'total'"),
    "rule": (lambda: mapped(writes={"total": "average"}), ArgumentError, "'average'.*'mean' or 'sum' or 'discard'"),
    "another device": (
        lambda: mapped(on_one_device()),
        ArgumentError,
        r"weight  \(Param\).*float32\[3, 3\] on .*0.*4 devices.*tether.place",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_and_where(case):
    call, error, words = ERRORS[case]
    with pytest.raises(error, match=f"(?s)^shard_map: .*{words}" if "selection" not in case else f"(?s){words}"):
        call()
