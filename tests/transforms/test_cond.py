# SPDX-License-Identifier: Apache-2.0
"""cond and switch: one branch counts, whatever the others would write; against Python's own branches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import WAYS, XS, Net, advanced, close, number, same, stream, values
from tether import nn
from tether.errors import ArgumentError, StructureError, VmapWriteError

X = XS[0]


class Two(tether.Module):
    def __init__(self):
        self.a, self.b = tether.State(1.0), tether.State(2.0)


def writes_a(m, x):
    m.a = m.a + x
    return m.b


def writes_a_and_b(m, x):
    m.a = m.b * x
    m.b = m.a + 1
    return m.a


def writes_b_and_a(m, x):
    m.b = m.a - x
    m.a = m.b * 3
    return m.b


def reads(m, x):
    return m.a * m.b * x


BRANCHES = [writes_a, writes_a_and_b, writes_b_and_a, reads]


@pytest.mark.parametrize("way", list(WAYS))
class TestWrites:
    def test_the_branch_that_is_taken_counts(self, way):
        """{a}, {a, b}, {b, a}, {} one after the other; an index out of range is clamped; one trace each."""
        m, runs = Two(), []
        branches = [lambda m, x, f=f: (runs.append(f), f(m, x))[1] for f in BRANCHES]
        step = WAYS[way](lambda index, x: tether.switch(index, branches, m, x))
        a, b = 1.0, 2.0
        for index in (0, 1, 3, 2, -5, 9):
            x = jnp.float32(index + 0.5)
            before = a, b
            place = min(max(index, 0), 3)
            if place == 0:
                a, expected = a + x, b
            elif place == 1:
                a = expected = b * x
                b = a + 1
            elif place == 2:
                b = expected = a - x
                a = b * 3
            else:
                expected = a * b * x
            np.testing.assert_allclose(step(jnp.int32(index), x), expected, rtol=1e-6)
            np.testing.assert_allclose((m.a, m.b), (a, b), rtol=1e-6)
            assert (before == (a, b)) == (place == 3)
        assert len(runs) == {"eager": 24, "jit": 4, "disable_jit": 6}[way]

    def test_gradient_of_the_branch_that_is_taken(self, way):
        """Two steps through State, and a second derivative: w^2 or 5."""
        h, w = tether.State(1.0), tether.Param(3.0)

        def grows():
            h.value = h.value * w.value
            return h.value

        def f(pred):
            h.value = 1.0
            return sum(tether.cond(pred, grows, lambda: w.value * 0 + 2.5) for _ in range(2))

        gradient = WAYS[way](tether.grad(f, wrt=w))
        assert float(gradient(jnp.bool_(True))) == 7 and float(h.value) == 9  # of w + w^2
        assert float(gradient(jnp.bool_(False))) == 0 and float(h.value) == 1
        second = tether.grad(lambda pred: tether.grad(f, wrt=w)(pred), wrt=w)
        assert float(WAYS[way](second)(jnp.bool_(True))) == 2

    def test_modules_go_in_and_come_out(self, way):
        """Operands, one stacked; the results: existing ones as themselves, new ones."""
        net, layers = Net(), tether.stack([nn.BatchNorm(3), nn.BatchNorm(3)])
        loop = nn.BatchNorm(3)

        def through(net, layers, x, key):
            y = tether.scan(lambda h, layer: (layer(h), None), x, layers)[0]
            return y, net, net.linear, [nn.Linear(2, 2, key=key)]

        def past(net, layers, x, key):
            return x, net, net.linear, [nn.Linear(2, 2, key=jax.random.fold_in(key, 1))]

        key = jax.random.key(4)
        for pred, made_of in ((True, key), (False, jax.random.fold_in(key, 1))):
            run = WAYS[way](lambda pred: tether.cond(pred, through, past, net, layers, X, key))
            y, again, linear, (made,) = run(jnp.bool_(pred))
            assert again is net and linear is net.linear
            close(made.weight, nn.Linear(2, 2, key=made_of).weight)
            if pred:
                h = loop(X)
                close((y, layers.mean[0]), (loop(h), jnp.float32(0.1 * X.mean(0))), rtol=1e-4, atol=1e-5)
            else:
                close(y, jnp.asarray(X))
            np.testing.assert_allclose(layers.mean[0], 0.1 * X.mean(0), rtol=1e-4)

    def test_stream(self, way):
        """Advances once where the branch draws, however often; the masks are those of the branch alone."""
        draws = lambda: jnp.stack([number(tether.random.draw()) for _ in range(3)])
        step = WAYS[way](lambda pred: tether.cond(pred, draws, lambda: jnp.zeros(3)))
        assert not np.any(step(jnp.bool_(False))) and stream() == advanced(0)
        found = step(jnp.bool_(True))
        assert stream() == advanced(1)
        with tether.random.scope(0) as scope:
            scope.value = jax.random.split(jax.random.key(0))[1]
            close(found, draws())


class TestLanes:
    def test_predicates_of_private_state_select(self):
        """Branches of an ensemble, in a scan in the lanes: member i follows its own predicates."""
        ensemble = tether.stack([Two(), Two(), Two()])
        indices = jnp.array([[0, 1, 3], [2, 3, 3], [1, 1, 0]])

        def run(m, indices):
            return tether.scan(lambda c, i: (c, tether.switch(i, BRANCHES, m, 0.5)), 0, indices)[1]

        alone = tether.unstack(ensemble)
        found = tether.jit(tether.vmap(run))(ensemble, indices)
        for lane, m in enumerate(alone):
            expected = [BRANCHES[int(i)](m, 0.5) for i in indices[lane]]
            np.testing.assert_allclose(found[lane], expected, rtol=1e-6)
            np.testing.assert_allclose((ensemble.a[lane], ensemble.b[lane]), (m.a, m.b), rtol=1e-6)

    def test_predicates_that_write_to_shared_state_differ(self):
        m = Two()
        lanes = tether.vmap(lambda pred: tether.cond(pred, writes_a, reads, m, 1.0))
        for way in WAYS.values():
            with pytest.raises(VmapWriteError, match=r"at: +a +\(State\)"):
                way(lanes)(jnp.array([True, False]))
            assert float(m.a) == 1
        tether.vmap(lambda x: tether.cond(True, writes_a, reads, m, 1.0) + x)(jnp.ones(2))
        assert float(m.a) == 2


def test_predicates_and_results_are_those_of_jax():
    for pred in (True, 2, 0.0, np.bool_(False)):
        args = (pred, lambda x, y: {"a": x, "b": None}, lambda x, y: {"a": x * y, "b": None}, jnp.arange(2.0), 3.0)
        same(tether.cond(*args), jax.lax.cond(*args))
    for index in (-1, 7, np.int8(1)):
        args = (index, [jnp.sin, jnp.cos, jnp.tan], jnp.arange(2.0))
        same(tether.switch(*args), jax.lax.switch(*args))
    same(tether.switch(0, (jnp.sin,), 1.0), jnp.sin(1.0))
    key = tether.cond(True, lambda key: jax.random.fold_in(key, 1), lambda key: key, jax.random.key(0))
    same(key, jax.random.fold_in(jax.random.key(0), 1))
    text = tether.cond(True, lambda x, mode, f: f(x) if mode == "f" else x, lambda x, mode, f: x, 2.0, "f", jnp.exp2)
    assert float(text) == 4


def test_failure_in_the_second_branch():
    m, fault = Two(), [KeyboardInterrupt(), ValueError()]

    def failing(m, x):
        tether.random.draw()
        y = writes_b_and_a(m, x)
        if fault:
            raise fault[0]
        return y

    call = lambda x=2.0: tether.cond(False, writes_a_and_b, failing, m, x)
    step = tether.jit(call)
    while fault:
        for f in (
            call,
            step,
            lambda: tether.grad(call)(2.0),
            lambda: tether.scan(lambda c, _: (c, call()), 0, length=2),
        ):
            for disabled in (False, True):
                with pytest.raises(type(fault[0])), jax.disable_jit(disabled):
                    f()
                assert (float(m.a), float(m.b)) == (1, 2) and stream() == advanced(0)
        fault.pop()
    with jax.checking_leaks():
        assert float(step()) == -1
    assert (float(m.a), float(m.b)) == (-3, -1) and stream() == advanced(1)


def test_errors():
    net, other = nn.Linear(2, 2, key=jax.random.key(0)), nn.Linear(2, 2, key=jax.random.key(1))
    x = jnp.float32(1)
    for error, message, call in (
        (
            ArgumentError,
            r"cond: pred is no scalar.\n +got: +float32\[2\]",
            lambda: tether.cond(jnp.ones(2), jnp.sin, jnp.cos, x),
        ),
        (ArgumentError, r"cond: pred is no scalar.\n +got: +'yes'", lambda: tether.cond("yes", jnp.sin, jnp.cos, x)),
        (ArgumentError, r"switch: index is no scalar.\n +got: +list of 2", lambda: tether.switch([1, 2], [jnp.sin], x)),
        (
            ArgumentError,
            r"switch: the index is no integer.\n +got: +bool\[\]",
            lambda: tether.switch(True, [jnp.sin], x),
        ),
        (ArgumentError, r"switch: there are no branches.\n +got: +list of 0", lambda: tether.switch(0, [], x)),
        (ArgumentError, r"switch: there are no branches.\n", lambda: tether.switch(0, jnp.sin, x)),
        (
            StructureError,
            r"true_fun: \(\*, \*\), false_fun: \[\*, None\]",
            lambda: tether.cond(True, lambda: (1.0, 2.0), lambda: [1.0, None]),
        ),
        (
            StructureError,
            r"leaf 1 of the result\n +got: +true_fun: float32\[\], false_fun: int32\[\]",
            lambda: tether.cond(True, lambda: (x, 2.0), lambda: (x, 2)),
        ),
        (
            StructureError,
            r"branches\[0\]: float32\[\], branches\[2\]: float32\[2\]",
            lambda: tether.switch(0, [lambda: x, lambda: x, lambda: jnp.ones(2)]),
        ),
        (
            StructureError,
            r"true_fun: <an existing Linear>, false_fun: \{'a': <a new Linear>\}",
            lambda: tether.cond(True, lambda: net, lambda: {"a": tether.clone(net)}),
        ),
        (
            StructureError,
            r"(?s)true_fun: <an existing Linear>, false_fun: <an existing Linear>.*2\. .*jnp.where",
            lambda: tether.cond(True, lambda: net, lambda: other),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_nothing_is_left_in_a_net():
    net = Net()
    structure, before = jax.tree.structure(net), values(net)
    tether.jit(lambda pred: tether.cond(pred, net, jnp.negative, X))(jnp.bool_(False))
    same(values(net), before)
    assert jax.tree.structure(net) == structure
