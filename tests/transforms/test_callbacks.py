# SPDX-License-Identifier: Apache-2.0
"""Callbacks to the host, in every transformation: once a run with the right values, and never while tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tether


class Talking:
    """x -> 3 x, by callbacks of all kinds, which are logged, and a count of the calls in a State."""

    def __init__(self):
        self.log, self.calls = [], tether.State(0)

    def __call__(self, x):
        self.calls.value = self.calls.value + 1
        x = jax.lax.stop_gradient(x)  # callbacks have no derivative
        like = jax.ShapeDtypeStruct((), jnp.float32)
        jax.debug.print("print {}", x)
        jax.debug.callback(lambda value: self.log.append(("debug", float(value))), x)
        same = io_callback(lambda value: self._logged("io", value), like, x)
        return same + jax.pure_callback(
            lambda value: self._logged("pure", 2 * value), like, x, vmap_method="sequential"
        )

    def _logged(self, kind, value):
        self.log.append((kind, float(value)))
        return np.float32(value)


def custom_vjp(f):
    custom = tether.custom_vjp(f)
    custom.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return custom


def custom_jvp(f):
    custom = tether.custom_jvp(f)
    custom.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return custom


def of_value(f):
    """x -> f(x), by way of a gradient."""
    return lambda x: tether.value_and_grad(lambda x: f(x) + 0 * x)(x)[0]


def turned(f):
    return lambda x: tether.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]


def scanned(f):
    return lambda xs: tether.scan(lambda _, x: (None, f(x)), None, xs)[1]


# The program of f, what it is called with, what f is then called with, and the result.
PROGRAMS = {
    "plain": (lambda f: f, 2.0, [2.0], 6.0),
    "grad": (of_value, 2.0, [2.0], 6.0),
    "vmap": (tether.vmap, [1.0, 2.0], [1.0, 2.0], [3.0, 6.0]),
    "vmap of grad": (lambda f: tether.vmap(of_value(f)), [1.0, 2.0], [1.0, 2.0], [3.0, 6.0]),
    "scan": (
        lambda f: lambda xs: tether.scan(lambda _, x: (None, f(x)), None, xs)[1],
        [1.0, 2.0],
        [1.0, 2.0],
        [3.0, 6.0],
    ),
    "map": (lambda f: lambda xs: tether.map(f, xs), [1.0, 2.0], [1.0, 2.0], [3.0, 6.0]),
    "fori_loop": (lambda f: lambda x: tether.fori_loop(0, 2, lambda i, x: f(x), x), 2.0, [2.0, 6.0], 18.0),
    "while_loop": (turned, 2.0, [2.0, 6.0], 18.0),
    "cond, taken": (lambda f: lambda x: tether.cond(x > 1, f, lambda x: x, x), 2.0, [2.0], 6.0),
    "cond, not taken": (lambda f: lambda x: tether.cond(x < 1, f, lambda x: x, x), 2.0, [], 2.0),
    "switch": (lambda f: lambda x: tether.switch(1, [jnp.sin, f, jnp.cos], x), 2.0, [2.0], 6.0),
    "checkpoint": (tether.checkpoint, 2.0, [2.0], 6.0),
    "custom_vjp": (custom_vjp, 2.0, [2.0], 6.0),
    "grad of custom_vjp": (lambda f: of_value(custom_vjp(f)), 2.0, [2.0], 6.0),
    "custom_jvp": (custom_jvp, 2.0, [2.0], 6.0),
    "grad of custom_jvp": (lambda f: of_value(custom_jvp(f)), 2.0, [2.0], 6.0),
    "checkify": (lambda f: lambda x: tether.checkify(f)(x)[1], 2.0, [2.0], 6.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_callbacks(name, capsys):
    make, x, inputs, right = PROGRAMS[name]
    f = Talking()
    program, x = make(f), jnp.asarray(x)
    jitted = tether.jit(program)
    for look in (tether.eval_shape, lambda *args: tether.make_jaxpr(program)(x), lambda *args: tether.uses(program)(x)):
        look(program, x)
    jitted.lower(x)
    assert f.log == [] and int(f.calls.value) == 0
    per_run = 1 if "vmap" in name else len(inputs)
    for calls, run in enumerate((program, jitted, jitted), 1):
        f.log.clear()
        out = run(x)
        jax.effects_barrier()
        np.testing.assert_allclose(out, right)
        printed = [("print", float(line.split()[1])) for line in capsys.readouterr().out.splitlines()]
        kinds = {"debug": 1, "io": 1, "pure": 2, "print": 1}
        assert sorted(f.log + printed) == sorted((kind, k * value) for kind, k in kinds.items() for value in inputs)
        assert int(f.calls.value) == calls * per_run
