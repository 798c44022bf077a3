# SPDX-License-Identifier: Apache-2.0
"""What holds for every loop and branching: one run of the Python, streams, ensembles, lanes, failures."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import (
    WAYS,
    XS,
    Net,
    Noisy,
    advanced,
    close,
    distinct,
    number,
    same,
    stream,
    values,
    without_jit,
)
from tether import nn
from tether.errors import ArgumentError, MissedReadWarning, VmapWriteError

X = XS[0]

# Each runs ``fun(x)``, twice where it loops, and gives what it gave last, or in each turn.
KINDS = {
    "scan": lambda fun, x: tether.scan(lambda c, _: (c, fun(c)), x, length=2)[1],
    "fori_loop": lambda fun, x: tether.fori_loop(0, 2, lambda i, c: fun(c), x),
    "while_loop": lambda fun, x: tether.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, fun(c[1])), (0, x))[1],
    "cond": lambda fun, x: tether.cond(jnp.abs(x).sum() >= 0, fun, lambda x: x, x),
}


@pytest.mark.parametrize("kind", list(KINDS))
class TestAll:
    def test_python_runs_once_for_each_compilation(self, kind):
        """Eager: once a call; compiled, under grad, vmap, checkpoint: once for all calls."""
        runs, w = [], tether.Param(2.0)

        def fun(x):
            runs.append(1)
            return x * w.value

        call = functools.partial(KINDS[kind], fun)
        for _ in range(2):
            runs.clear()
            call(jnp.ones(2))
            assert runs == [1]
        steps = [tether.jit(call), tether.jit(tether.vmap(tether.checkpoint(call)))]
        if kind != "while_loop":
            steps.append(tether.jit(tether.grad(lambda x: call(x).sum(), wrt=w)))
        for step in steps:
            runs.clear()
            for _ in range(2):
                step(jnp.ones((2, 2)))
            assert runs == [1]

    def test_streams(self, kind):
        """Turns and lanes draw other numbers; the default one and a model's own advance once; the same in every way."""
        noisy = Noisy(1)
        call = functools.partial(KINDS[kind], lambda x: noisy(x) + 2 * number(tether.random.draw()))

        def results(wrapped, x):
            tether.seed(0)
            noisy.rng = jax.random.key(1)
            out = wrapped(x)
            assert stream() == advanced(1)
            same(noisy.rng, jax.random.split(jax.random.key(1))[0])
            return out

        lanes = results(tether.jit(tether.vmap(call)), jnp.zeros(3))
        assert distinct(lanes.reshape(-1))
        if kind == "fori_loop":  # operations in lanes, one by one, take long
            close(results(without_jit(tether.vmap(call)), jnp.zeros(3)), lanes)
        alone = [results(way(call), jnp.float32(0)) for way in WAYS.values()]
        assert distinct(alone[0].reshape(-1))
        close(alone[1:], alone[:1] * 2)

    def test_ensembles(self, kind):
        """Member i is a model that runs alone: values, state, masks."""
        ensemble, noises = tether.stack([Net(0), Net(1)]), tether.stack([Noisy(0), Noisy(1)])
        pairs = zip(tether.unstack(ensemble), tether.unstack(noises), strict=True)
        run = lambda net, noise, x: KINDS[kind](lambda x: noise(net(x, training=False)), x)
        found = tether.jit(tether.vmap(run))(ensemble, noises, XS[:2])
        run_alone = tether.jit(run)
        for i, (net, noise) in enumerate(pairs):
            close(found[i], run_alone(net, noise, XS[i]), atol=1e-5)
            close({n: v[i] for n, v in values(ensemble).items()}, values(net))
            same(noises.rng[i], noise.rng)

    def test_failures_change_nothing(self, kind):
        noisy, count, fault = Noisy(1), tether.State(0), [ValueError(), KeyboardInterrupt()]

        def fun(x):
            count.value = count.value + 1
            x = noisy(x) + number(tether.random.draw())
            if fault:
                raise fault[0]
            return x

        call = functools.partial(KINDS[kind], fun)
        step = tether.jit(call)
        while fault:
            for f in (call, step, without_jit(call), lambda x: tether.vmap(call)(x[None]), tether.grad(call)):
                with pytest.raises(type(fault[0])):
                    f(jnp.float32(0))
                assert int(count.value) == 0 and stream() == advanced(0)
                same(noisy.rng, jax.random.key(1))
            fault.pop(0)
        with jax.checking_leaks():
            step(jnp.float32(0))
        assert int(count.value) == (1 if kind == "cond" else 2) and stream() == advanced(1)

    def test_collectives(self, kind):
        def fun(x):
            return jax.lax.psum(x, "a") / 2 + jax.lax.axis_index("a").astype(x.dtype)

        call = functools.partial(KINDS[kind], fun)
        found = [f(call, axis_name="a")(jnp.array([[1.0], [3.0]])) for f in (tether.vmap, jax.vmap)]
        same(found[0], found[1])
        once, twice = [2.0, 3.0], [2.5, 3.5]  # psum / 2 + index
        np.testing.assert_allclose(found[0].reshape(2, -1)[:, -1], once if kind in ("scan", "cond") else twice)

    def test_lanes_that_write(self, kind):
        """To a shared cell: the same in all lanes, or an error. A predicate that differs makes the writes differ."""
        count, total = tether.State(0), tether.State(0.0)

        def counting(x):
            count.value = count.value + 1
            return x

        def adding(x):
            total.value = total.value + x
            return x

        lanes = jnp.arange(3.0)
        tether.vmap(lambda x: KINDS[kind](counting, jnp.float32(1)).sum() + x)(lanes)
        assert int(count.value) == (1 if kind == "cond" else 2)
        with pytest.raises(VmapWriteError, match="differs from lane to lane"):
            tether.vmap(functools.partial(KINDS[kind], adding))(lanes)
        assert float(total.value) == 0


class TestReach:
    def test_however_the_function_comes_by_it(self):
        """Argument, closure, global, default, partial, bound method, container; and what only a read finds."""
        net = nn.BatchNorm(3)
        scope = {"net": net}
        exec("def by_global(c, x):\n    return c, net(x)", scope)

        class Trainer:
            def __init__(self):
                self.net = net

            def turn(self, c, x):
                return c, self.net(x)

        held = {"nets": [net]}
        hidden = types.MappingProxyType({"net": net})  # discovery doesn't look inside
        bodies = [
            lambda c, x: (c, net(x)),
            scope["by_global"],
            Trainer().turn,
            functools.partial(lambda net, c, x: (c, net(x)), net),
            lambda c, x, net=net: (c, net(x)),
            lambda c, x: (c, held["nets"][0](x)),
        ]
        seen = []
        for body in bodies:
            tether.update(net, {"mean": jnp.zeros(3), "var": jnp.ones(3)})
            tether.scan(body, 0, XS)
            seen.append((net.mean, net.var))
        tether.update(net, {"mean": jnp.zeros(3), "var": jnp.ones(3)})
        with pytest.warns(MissedReadWarning, match="scan: .* reads Variables that were found only while"):
            tether.scan(lambda c, x: (c, hidden["net"](x)), 0, XS)
        seen.append((net.mean, net.var))
        for one in seen:
            close(one, seen[0])
        assert not np.allclose(seen[0][0], 0)

    def test_what_is_no_function_or_array(self):
        for call in (
            lambda: tether.scan(lambda c, x: (c, "a"), 0, XS),
            lambda: tether.cond(True, lambda: "a", lambda: "a"),
        ):
            with pytest.raises(ArgumentError, match=r"something that is no array.\n +at: +result.*\n +got: +'a'"):
                call()
        for call in (
            lambda: tether.scan(3, 0, XS),
            lambda: tether.map(3, XS),
            lambda: tether.fori_loop(0, 1, 3, 0),
            lambda: tether.while_loop(lambda c: True, 3, 0),
            lambda: tether.cond(True, jnp.sin, 3, 0.0),
            lambda: tether.switch(0, [3], 0.0),
        ):
            with pytest.raises(ArgumentError, match="is no function"):
                call()


class TestNormInLanes:
    """BatchNorm with a named axis in a scan in nested lanes: one axis, the other, both."""

    XS = np.random.default_rng(1).normal(size=(2, 2, 4, 3)).astype(np.float32)  # [turn, outer, inner, feature]

    def statistics(self, axes):
        mean, var = np.zeros(3), np.ones(3)
        for x in np.float64(self.XS):
            mean, var = 0.9 * mean + 0.1 * x.mean(axes), 0.9 * var + 0.1 * x.var(axes)
        return np.float32(mean), np.float32(var)

    @pytest.mark.parametrize("axes", ["outer", "inner", "both"])
    def test_statistics(self, axes):
        names = {"outer": "o", "inner": "i", "both": ("o", "i")}[axes]
        norm = nn.BatchNorm(3, axis_name=names, eps=0)
        scan = lambda norm, xs: tether.scan(lambda c, x: (c, norm(x)), 0, xs)[1]
        size = {"outer": 4, "inner": 2, "both": None}[axes]
        norms = norm if size is None else tether.stack([norm] * size)
        in_inner = 0 if axes == "outer" else None
        in_outer = 0 if axes == "inner" else None
        inner = tether.vmap(scan, in_axes=(in_inner, 1), out_axes=1, axis_name="i")
        outer = tether.jit(tether.vmap(inner, in_axes=(in_outer, 1), out_axes=1, axis_name="o"))
        found = outer(norms, self.XS)
        over = {"outer": 1, "inner": 2, "both": (1, 2)}[axes]
        close(
            found,
            (self.XS - self.XS.mean(over, keepdims=True)) / self.XS.std(over, keepdims=True),
            rtol=1e-4,
            atol=1e-4,
        )
        close(
            (norms.mean, norms.var),
            self.statistics(tuple(a - 1 for a in over) if axes == "both" else over - 1),
            rtol=1e-4,
        )
