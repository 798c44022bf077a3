# SPDX-License-Identifier: Apache-2.0
"""Functions with a rule of their own, both kinds: gradients by hand, and state and masks under every transformation."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, GradientError, LeakError

XS = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32)  # so long that no two masks agree


class Layer(tether.Module):
    def __init__(self, seed=0):
        self.linear = nn.Linear(3, 40, key=jax.random.key(seed))

    def __call__(self, x):
        return self.linear(x)


def masked(kind, calls, dropout):
    """y = dropout(layer(x)), whose rule multiplies derivatives by 10; it counts its calls."""

    def f(layer, x):
        calls.value = calls.value + 1
        y = layer(x)
        return y * dropout(jnp.ones_like(y))

    if kind == "vjp":
        f = tether.custom_vjp(f)

        def fwd(layer, x):
            calls.value = calls.value + 1
            y = layer(x)
            mask = dropout(jnp.ones_like(y))
            return y * mask, (layer, x, mask)

        def bwd(residuals, g):
            layer, x, mask = residuals
            g = 10 * g * mask
            return {"linear.weight": jnp.outer(g, x), "linear.bias": g}, g @ layer.linear.weight

        f.defvjp(fwd, bwd)
        return f
    f = tether.custom_jvp(f)

    @f.defjvp
    def rule(primals, tangents):
        (layer, x), (of_layer, of_x) = primals, tangents
        calls.value = calls.value + 1
        y = layer(x)
        mask = dropout(jnp.ones_like(y))
        tangent = of_layer.linear.weight @ x + of_layer.linear.bias + layer.linear.weight @ of_x
        return y * mask, 10 * mask * tangent

    return f


def with_gradient(loss):
    return tether.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def row_by_row(f):
    return lambda layer, xs: jnp.stack([f(layer, x) for x in xs])


def scanned(f):
    return lambda layer, xs: tether.scan(lambda _, x: (None, f(layer, x)), None, xs)[1]


def vmapped(f):
    return tether.vmap(f, in_axes=(None, 0))


def zeros(layer, xs):
    return jnp.zeros((2, 40))


def chosen(f):
    return lambda *args: tether.cond(True, scanned(tether.checkpoint(f)), zeros, *args)


# How the rows are computed, what is around the loss, and what around the gradient.
PROGRAMS = {
    "eager": (row_by_row, None, None),
    "jit of grad of cond of scan of checkpoint": (chosen, None, tether.jit),
    "grad of jit of vmap of jit": (lambda f: vmapped(tether.jit(f)), tether.jit, None),
}


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_value_gradient_state_and_masks(kind, program):
    rows, around_loss, around = PROGRAMS[program]
    calls, layer = tether.State(0), Layer()
    f = rows(masked(kind, calls, nn.Dropout(0.5)))

    def loss(layer, xs):
        ys = f(layer, xs)
        return (ys * WEIGHTS).sum(), ys

    same = lambda fun: fun
    step = (around or same)(with_gradient((around_loss or same)(loss)))
    structure, seen = jax.tree.structure(layer), []
    for call in (1, 2):
        (_, ys), (of_layer, of_xs) = step(layer, XS)
        weight, bias = np.float64(layer.linear.weight), np.float64(layer.linear.bias)
        masks = ys / (XS @ weight.T + bias)
        np.testing.assert_allclose(masks, np.where(masks > 1, 2, 0), atol=1e-3)
        seen += list(masks > 1)
        g = 10 * WEIGHTS * np.round(masks)
        np.testing.assert_allclose(of_layer.linear.weight, g.T @ XS, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_layer.linear.bias, g.sum(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_xs, g @ weight, rtol=1e-4, atol=1e-4)
        assert int(calls.value) == call * (1 if "vmap" in program else 2)
    assert len({mask.tobytes() for mask in seen}) == 4  # another mask in each row, of each call
    assert jax.tree.structure(layer) == structure
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in [*jax.tree.leaves(layer), tether.random.draw()])


KINDS = pytest.mark.parametrize("kind", ["vjp", "jvp"])


@KINDS
def test_undifferentiated_and_nothing_leaks(kind):
    calls, layer = tether.State(0), Layer()
    f = masked(kind, calls, nn.Dropout(0.5).eval())
    right = XS @ np.float64(layer.linear.weight).T + np.float64(layer.linear.bias)
    loss = lambda layer, xs: (vmapped(f)(layer, xs) * WEIGHTS).sum()
    with jax.checking_leaks():
        np.testing.assert_allclose(tether.jit(vmapped(f))(layer, XS), right, rtol=1e-4, atol=1e-5)
        tether.grad(tether.jit(loss))(layer, XS)
        tether.jit(tether.vmap(tether.grad(lambda x: f(Layer(), x).sum())))(XS)  # a layer of the trace itself
    np.testing.assert_allclose(f(layer, XS[0]), right[0], rtol=1e-4, atol=1e-5)
    assert int(calls.value) == 4


@KINDS
def test_grad_of_grad_is_that_of_the_rule(kind):
    layer, calls = Layer(), tether.State(0)
    f = masked(kind, calls, nn.Dropout(0.0))
    loss = lambda layer, x: (f(layer, x) ** 2).sum()
    penalty = lambda layer, x: (tether.grad(loss, argnums=1)(layer, x) ** 2).sum()

    def by_hand(weight, bias, x):  # of the gradient that the rule gives, 10 * 2y @ weight
        y = weight @ x + bias
        return ((20 * y @ weight) ** 2).sum()

    args = layer.linear.weight, layer.linear.bias, jnp.asarray(XS[0])
    np.testing.assert_allclose(penalty(layer, XS[0]), by_hand(*args), rtol=1e-5)
    right = jax.grad(by_hand, (0, 1))(*args)
    gradient = tether.jit(tether.grad(penalty))(layer, XS[0])
    np.testing.assert_allclose(gradient.linear.weight, right[0], rtol=1e-4)
    np.testing.assert_allclose(gradient.linear.bias, right[1], rtol=1e-4)
    assert int(calls.value) == 2


@KINDS
def test_the_rule_runs_with_the_mode_and_key_of_the_call(kind):
    f = masked(kind, tether.State(0), nn.Dropout(0.5))

    class Net(tether.Module):
        def __init__(self):
            self.layer = Layer()

        def __call__(self, x):
            return f(self.layer, x).sum()

    net, x = Net(), jnp.asarray(XS[0])
    whole = 10 * np.float64(net.layer.linear.weight).sum(0)
    gradients = []
    for around in (lambda fun: fun, tether.jit):  # of jit, the rule runs after the call
        gradient = tether.grad(around(lambda x: net(x, training=False)))(x)
        np.testing.assert_allclose(gradient, whole, rtol=1e-4)
        gradients.append(tether.grad(around(lambda x, key: net(x, key=key)))(x, jax.random.key(5)))
    np.testing.assert_allclose(*gradients, rtol=1e-5)
    assert not np.allclose(gradients[0], whole, rtol=1e-2)


@KINDS
def test_streams_in_lanes(kind):
    """The rule draws from the lanes' own streams, also of a program that was made without lanes."""
    f = masked(kind, tether.State(0), nn.Dropout(0.5))
    layer, keys = Layer(), []

    def gradients(fun):
        return tether.vmap(tether.grad(lambda layer, x: fun(layer, x).sum(), argnums=1), in_axes=(None, 0))

    program = tether.jit(f)
    program(layer, XS[0])
    for fun in (f, program):
        tether.seed(0)
        found = gradients(fun)(layer, XS)
        assert not np.allclose(found[0], found[1], rtol=1e-2)
        keys.append((found, jax.random.key_data(tether.random.draw())))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *keys)
    assert program.traces <= 2


# Ways to differentiate a model that the function closes over.
DIFFERENTIATED = {
    "eager": lambda loss: tether.grad(loss),
    "jit of grad": lambda loss: tether.jit(tether.grad(loss)),
    "grad of jit": lambda loss: tether.grad(tether.jit(loss)),
    "grad of checkpoint": lambda loss: tether.grad(tether.checkpoint(loss)),
    "grad of scan": lambda loss: tether.grad(
        lambda layer: tether.scan(lambda total, _: (total + loss(layer), None), 0.0, length=2)[0]
    ),
}


@KINDS
@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_model_that_is_closed_over_gets_no_gradient_but_an_error(kind, way):
    layer, calls = Layer(), tether.State(0.0)
    inner = masked(kind, calls, nn.Dropout(0.5).eval())
    f = (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(lambda x: inner(layer, x))
    if kind == "vjp":
        f.defvjp(lambda x: (f(x), x), lambda x, g: (g @ layer.linear.weight,))
    else:
        f.defjvps(lambda dx, y, x: layer.linear.weight @ dx)
    x = jnp.asarray(XS[0])
    with pytest.raises(GradientError, match=r"(?s)no argument.*linear\.(weight|bias).*pass the module as an argument"):
        DIFFERENTIATED[way](lambda layer: f(x * layer.linear.bias.sum()).sum())(layer)
    assert float(calls.value) == 0
    right = np.float64(layer.linear.weight).sum(0)  # and with respect to x it is fine
    np.testing.assert_allclose(tether.grad(lambda x: f(x).sum())(x), right, rtol=1e-4)
    frozen = DIFFERENTIATED[way](lambda other: f(x * other.linear.bias.sum()).sum())(Layer())
    assert frozen.linear.bias.shape == (40,) and float(calls.value) == 3 if "scan" in way else 2


@KINDS
def test_what_is_differentiated_may_be_written_unread_and_written_state_has_no_tangent(kind):
    hidden = tether.State(jnp.ones(3))
    f = (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(lambda x: _set(hidden, x) * 2)
    if kind == "vjp":
        f.defvjp(lambda x: (_set(hidden, x) * 2, None), lambda _, g: (7 * g,))
    else:
        f.defjvps(lambda dx, y, x: 7 * dx)

    def loss(x):
        hidden.value = x**2  # a tangent
        y = f(x)
        return y.sum() + hidden.value.sum()  # it is gone

    np.testing.assert_allclose(tether.grad(loss)(jnp.ones(3)), [7.0] * 3)
    np.testing.assert_array_equal(hidden.value, [1.0] * 3)


@KINDS
def test_integers_are_not_differentiated(kind):
    """Though JAX says that they are, when they come out of a rule."""
    pair, count = jax.custom_vjp(lambda x: (x, jnp.int32(3))), tether.State(0)
    pair.defvjp(lambda x: (pair(x), None), lambda _, g: (g[0],))
    f = (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(lambda x: x * count.value.astype(jnp.float32))
    if kind == "vjp":
        f.defvjp(lambda x: (f(x), count.value), lambda n, g: (g * n.astype(jnp.float32),))
    else:
        f.defjvps(lambda dx, y, x: dx * count.value.astype(jnp.float32))

    def loss(x):
        x, count.value = pair(x)
        return f(x)

    assert float(tether.grad(loss)(2.0)) == 3.0 and int(count.value) == 3


def _set(cell, x):
    cell.value = x
    return x


@KINDS
def test_the_rule_writes_what_the_function_writes(kind):
    read, extra = tether.State(1.0), tether.State(0)
    write = lambda x: _set(read, x) * 2

    def build(rule_writes):
        f = (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(write)
        if kind == "vjp":
            f.defvjp(lambda x: (rule_writes(x), None), lambda _, g: (g,))
        else:
            f.defjvp(lambda primals, tangents: (rule_writes(*primals), tangents[0]))
        return f

    for around in (lambda fun: fun, tether.jit):
        tether.grad(around(build(lambda x: x * 2)))(5.0)  # it writes nothing: the value stays
        assert float(read.value) == 1.0

    def more(x):
        extra.value = extra.value + 1
        return write(x)

    with pytest.raises(GradientError, match=r"(?s)writes a Variable that .* itself doesn't.*State"):
        tether.grad(tether.jit(build(more)))(5.0)
    assert (float(read.value), int(extra.value)) == (1.0, 0)
    draws = build(lambda x: write(x) + 0 * jax.random.normal(tether.random.draw(), ()))
    with pytest.raises(LeakError, match=r"(?s)did not see.*tether\.random\.default.*draw in"):
        tether.grad(tether.jit(draws))(5.0)


@KINDS
def test_a_failure_writes_nothing_and_the_next_call_works(kind):
    calls, layer = tether.State(0), Layer()
    fail = [True]

    class Failing(nn.Dropout):
        def __call__(self, x):
            if fail:
                raise ZeroDivisionError
            return super().__call__(x)

    f = masked(kind, calls, Failing(0.5))
    loss = lambda layer: f(layer, XS[0]).sum()
    steps = [loss, tether.grad(tether.jit(loss)), tether.jit(tether.grad(loss))]
    for step in steps:
        with pytest.raises(ZeroDivisionError):
            step(layer)
    assert int(calls.value) == 0
    fail.clear()
    for step in steps:
        step(layer)
    assert int(calls.value) == 3


@KINDS
def test_capture(kind):
    f, layer = masked(kind, tether.State(0), nn.Dropout(0.5)), Layer()
    right = layer(XS[0])
    loss = lambda x: f(layer, x).sum()
    for step in (tether.jit(tether.grad(loss)), tether.grad(tether.jit(loss))):
        _, seen = tether.capture(step, "linear")(jnp.asarray(XS[0]))
        np.testing.assert_allclose(seen["linear"], right, rtol=1e-5)


@KINDS
def test_arguments(kind):
    custom = tether.custom_vjp if kind == "vjp" else tether.custom_jvp

    @custom
    def f(x, scale=2.0, *, loud=None):
        return x * scale

    name = "defvjp" if kind == "vjp" else "defjvp"
    with pytest.raises(ArgumentError, match=rf"(?s)f has no rule.*f\.{name}"):
        f(1.0)
    with pytest.raises(ArgumentError, match="no function"):
        custom(3)
    if kind == "vjp":
        f.defvjp(lambda x, scale: (f(x, scale), scale), lambda scale, g: (g * scale, None))
    else:
        f.defjvps(lambda dx, y, x, scale: dx * scale, None)
    assert float(f(3.0)) == 6.0 and float(f(scale=4.0, x=3.0)) == 12.0
    assert float(tether.grad(f)(3.0, scale=5.0)) == 5.0
    wrong = [((1.0,), {"loud": True}, "loud, by name alone"), ((), {}, "missing"), ((1, 2, 3), {}, "too many")]
    for args, kwargs, said in wrong:
        with pytest.raises(ArgumentError, match=rf"(?s)by position.*at:.*f\(x.*{said}"):
            f(*args, **kwargs)


@KINDS
def test_python_control_flow_on_values(kind):
    """Where nothing is compiled, function and rule see values, as in JAX."""
    f = (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(lambda x: jnp.sin(x) if x > 0 else jnp.cos(x))
    if kind == "vjp":
        f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g if x > 0 else 3 * g,))
    else:
        f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0] if primals[0] > 0 else 3 * tangents[0]))
    assert [float(tether.grad(f)(x)) for x in (1.0, -1.0)] == [2.0, 3.0]
    np.testing.assert_allclose([f(1.0), f(-1.0)], [np.sin(1.0), np.cos(-1.0)], rtol=1e-6)


@KINDS
def test_a_setting_of_modules_shares_their_compilations(kind):
    class Net(tether.Module):
        def __init__(self):
            self.act, self.weight = (
                (tether.custom_vjp if kind == "vjp" else tether.custom_jvp)(jnp.sin),
                tether.Param(2.0),
            )
            if kind == "vjp":
                self.act.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (7 * g,))
            else:
                self.act.defjvps(lambda dx, y, x: 7 * dx)

        def __call__(self, x):
            return self.act(self.weight * x)

    step = tether.jit(tether.grad(lambda net, x: net(x)))
    for _ in range(3):
        assert float(step(Net(), 3.0).weight) == 21.0
    assert step.traces == 1


@KINDS
@pytest.mark.parametrize("around", [lambda fun: fun, tether.grad], ids=["value", "grad"])
def test_a_program_with_a_rule_keeps_no_model_alive(kind, around):
    f = masked(kind, tether.State(0), nn.Dropout(0.5))
    step = tether.jit(around(lambda layer: f(layer, XS[0]).sum()))
    layer = Layer()
    step(layer)
    cells = [weakref.ref(variable) for variable in tether.variables(layer).values()]
    del layer
    gc.collect()
    assert [cell() for cell in cells] == [None, None]
    step(Layer(1))
    assert step.traces == 1


def test_shard_map():
    """Also without compilation, and where the call isn't differentiated though something else is."""

    class Scale(tether.Module):
        def __init__(self):
            self.by = tether.Param(3.0)

    f = tether.custom_vjp(lambda scale, x: scale.by * x)
    bwd = lambda args, g: ({"by": 10 * (g * args[1]).sum()}, 10 * g * args[0].by)
    f.defvjp(lambda *args: (f(*args), args), bwd)
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",)), jax.sharding.PartitionSpec("rows")
    mapped = lambda fun: tether.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)
    scale, xs = Scale(), np.array([1.0, 2.0], np.float32)
    rows = mapped(lambda xs: f(scale, xs))
    other = mapped(lambda xs: tether.grad(lambda x, y: (x * f(scale, y)).sum())(xs, xs))
    for around in (lambda fun: fun, tether.jit):
        assert around(rows)(xs).tolist() == around(other)(xs).tolist() == [3.0, 6.0]
    of_scale, of_xs = tether.jit(tether.grad(lambda scale, xs: rows(xs).sum(), argnums=(0, 1)))(scale, xs)
    assert float(of_scale.by) == 30.0 and of_xs.tolist() == [30.0, 30.0]
