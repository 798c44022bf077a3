# SPDX-License-Identifier: Apache-2.0
"""What loops hand on: modules that stay the same object, and modules as values."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.laws.kinds import KINDS, LOG, Task, loss_by_hand
from tests.transforms.loop_models import WAYS, XS, Net, close, same, values
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError, StructureError


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    net: Net
    h: jax.Array


def linear(seed):
    return nn.Linear(3, 3, key=jax.random.key(seed))


def arrays(module):
    return [np.asarray(v) for v in values(module).values()]


@functools.cache
def accumulated_by_hand():
    """The mean gradient of BatchNorm over the batches, and the state after them, one after the other."""
    task = Task(KINDS["batchnorm"].make())
    state, total = values(task), None
    params = {name: variable.value for name, variable in tether.variables(task, tether.Param).items()}
    loss = lambda params, state, x: loss_by_hand(KINDS["batchnorm"], {**state, **params}, x)
    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    for x in XS:
        gradient, state = gradient_of(params, state, x)
        gradient = {name: np.asarray(g) / 3 for name, g in gradient.items()}
        total = gradient if total is None else {name: total[name] + g for name, g in gradient.items()}
    return total, state


@pytest.mark.parametrize("way", list(WAYS))
class TestTheModuleItself:
    def test_comes_back_as_the_same_object(self, way):
        """As carry and closed over at once, in a dataclass, as a view; every write is seen at once."""
        net = Net()
        evaluating = net.eval()
        weight, bias, scale = map(np.float64, (net.linear.weight, net.linear.bias, net.scale))

        def turn(carry, x):
            holder, view = carry
            before = net.calls
            return (Holder(holder.net, view(x) + holder.h), view), (before, net.calls, net)

        run = lambda: tether.scan(turn, (Holder(net, jnp.zeros((4, 3))), evaluating), XS)
        (holder, view), (before, after, again) = WAYS[way](run)()
        assert holder.net is net and view is evaluating and again is net
        assert before.tolist() == [0, 1, 2] and after.tolist() == [1, 2, 3]
        h = sum((x @ weight.T + bias) * scale ** (turn + 1) + x for turn, x in enumerate(np.float64(XS)))
        np.testing.assert_allclose(holder.h, h, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(net.hidden, scale**3, rtol=1e-5)

    def test_a_member_of_another_is_carried_with_it(self, way):
        net = Net()

        def turn(c, x):
            c["net"].linear.weight = c["linear"].weight + 1
            return c, c["linear"].weight[0, 0]

        first = float(net.linear.weight[0, 0])
        out, seen = WAYS[way](lambda: tether.scan(turn, {"net": net, "linear": net.linear}, XS))()
        assert out["net"] is net and out["linear"] is net.linear
        np.testing.assert_allclose(seen, [first + 1, first + 2, first + 3], rtol=1e-6)


@pytest.mark.parametrize("way", list(WAYS))
class TestValues:
    def test_gradients_of_micro_batches(self, way):
        """The mean gradient; statistics as after k updates one after the other."""
        task = Task(KINDS["batchnorm"].make())
        expected, state = accumulated_by_hand()
        LOG[:] = ["go"]
        zeros = jax.tree.map(jnp.zeros_like, tether.filter(task, tether.Param))

        def turn(total, x):
            gradient = tether.grad(lambda task: task.loss(x))(task)
            return jax.tree.map(lambda t, g: t + g / 3, total, gradient), None

        total = WAYS[way](lambda zeros: tether.scan(turn, zeros, XS))(zeros)[0]
        assert type(total) is Task and total is not zeros and total.calls is None
        close({name: values(total)[name] for name in expected}, expected, rtol=1e-4, atol=1e-4)
        close(values(task), state)
        assert not np.any(zeros.scale) and len(LOG) == (4 if way == "disable_jit" else 2)

    def test_averages_swaps_and_new_modules(self, way):
        model, average = linear(0), linear(1)
        a, b, c = linear(2), linear(3), linear(4)
        keys = jax.random.split(jax.random.key(5), 3)

        def turn(carry, key):
            average, (a, b), new = carry
            model.weight = model.weight + 1
            return (tether.lerp(average, model, 0.5), (b, a), linear_of(key)), new.weight[0, 0]

        linear_of = lambda key: nn.Linear(3, 3, key=key)
        before = [arrays(m) for m in (average, a, b, c)]
        weight, start = (np.asarray(m.weight, np.float64) for m in (model, average))
        expected = start
        for t in range(1, 4):
            expected = (expected + weight + t) / 2
        (mean, (p, q), last), seen = WAYS[way](lambda: tether.scan(turn, (average, (a, b), c), keys))()
        np.testing.assert_allclose(mean.weight, expected, rtol=1e-5)
        np.testing.assert_allclose(model.weight, weight + 3, rtol=1e-6)
        same((p.weight, q.weight), (b.weight, a.weight))
        made = [linear_of(key).weight for key in keys]
        close(last.weight, made[-1])
        close(seen, jnp.stack([c.weight, *made[:-1]])[:, 0, 0])
        for module, old in zip((average, a, b, c), before, strict=True):
            assert all(map(np.array_equal, arrays(module), old))
        assert {mean, p, q, last}.isdisjoint({average, a, b, c})

    def test_gradients_go_through_it(self, way):
        """w_3 = w_0 (1 - x)^3 by three steps of descent along the gradient of x w^2 / 2."""
        model = nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
        start = float(model.weight[0, 0])

        def trained(x):
            def turn(inner, _):
                step = tether.grad(lambda inner: (inner.weight**2).sum() / 2)(inner)
                return jax.tree.map(lambda w, g: w - x * g, inner, step), None

            return tether.scan(turn, model, length=3)[0].weight.sum()

        found = WAYS[way](tether.value_and_grad(trained))(0.25)
        np.testing.assert_allclose(found, [start * 0.75**3, -3 * start * 0.75**2], rtol=1e-5)


class TestErrors:
    def test_modules(self):
        net, other = Net(), Net(1)
        unlike = nn.Linear(3, 2, key=jax.random.key(0))
        for message, body, init in (
            (
                r"at: +carry: linear.weight +\(Param\)\n.*in its place, and comes by it",
                lambda c, x: (tether.lerp(c, net, 0.5), c(x)),
                net,
            ),
            (
                r"at: +carry\[0\]: hidden +\(State\)\n.*, and writes to it",
                lambda c, x: ([tether.lerp(c[0], other, 0.5)], c[0](x)),
                [net],
            ),
            (
                r"at: +carry\[1\].*\n.*another place of the carry",
                lambda c, x: ((c[0], tether.clone(c[1])), x),
                (net, net),
            ),
            (r"at: +carry +\(Net\)\n +got: +a Linear", lambda c, x: (c.linear, x), net),
            (r"at: +carry +\(Net\)\n +got: +float32\[4, 3\]", lambda c, x: (c(x), x), net),
            (r"at: +carry +\(Net\)\n +got: +a Net of another structure", lambda c, x: (c.eval(), x), net),
            (
                r"at: +carry +\(Linear\)\n +got: +one with linear.weight: float32\[2, 3\] in place of float32\[3, 3\]",
                lambda c, x: (like(c, unlike), x),
                net.linear,
            ),
        ):
            with pytest.raises(StructureError, match=message):
                tether.scan(body, init, XS)
            assert int(net.calls) == int(other.calls) == 0

    def test_arrays(self):
        for error, message, body, init in (
            (
                StructureError,
                r"changes the structure.*\n +at: +carry\n +got: .*\(\*, \*\).*\n +expected: .*\*",
                lambda c, x: ((c, c), x),
                0.0,
            ),
            (
                ShapeError,
                r"at: +carry\['h'\]\n +got: +float32\[4, 3\]\n +expected: float32\[\]",
                lambda c, x: ({"h": c["h"] + x}, x),
                {"h": jnp.float32(0)},
            ),
            (
                DtypeError,
                r"changes the dtype.*\n +at: +carry\n +got: +float32\[\]\n +expected: int32\[\]",
                lambda c, x: (c.astype(jnp.float32), x),
                jnp.int32(0),
            ),
            (DtypeError, r"changes the kind.*\n +at: +carry\n +got: +'a'\n", lambda c, x: ("a", x), 0.0),
            (ArgumentError, r"can't be carried.*\n +at: +carry\[0\]\n +got: +'a'\n", lambda c, x: (c, x), ["a"]),
            (
                ArgumentError,
                r"can't be carried.*\n +at: +carry\n +got: +State object\n",
                lambda c, x: (c, x),
                tether.cell(Net(), "calls"),
            ),
        ):
            with pytest.raises(error, match=message):
                tether.scan(body, init, XS)
            with pytest.raises(error, match=message), jax.disable_jit():
                tether.scan(body, init, XS)


def like(module, other):
    """A module of the structure of one with the values of another."""
    return jax.tree.unflatten(jax.tree.structure(module), jax.tree.leaves(other))
