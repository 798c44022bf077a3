# SPDX-License-Identifier: Apache-2.0
"""Generators, and numbers drawn from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tether
import tether.compat.objax as objax


def test_a_generator_gives_jaxs_keys_in_order():
    generator, key = objax.random.Generator(3), jax.random.PRNGKey(3)
    for _ in range(3):
        key, wanted = jax.random.split(key, 2)
        np.testing.assert_array_equal(generator(), wanted)
    generator.seed(3)
    np.testing.assert_array_equal(generator(), jax.random.split(jax.random.PRNGKey(3), 2)[1])
    assert list(generator.vars().keys()) == ["(Generator)._key"] and generator.initial_seed == 3


def test_numbers():
    draw = lambda: objax.random.Generator(5)
    key = jax.random.split(jax.random.PRNGKey(5), 2)[1]
    close = np.testing.assert_allclose
    close(
        objax.random.normal((4,), mean=2, stddev=3, generator=draw()), jax.random.normal(key, (4,)) * 3 + 2, rtol=1e-6
    )
    close(objax.random.uniform([4], draw()), jax.random.uniform(key, (4,)))
    close(objax.random.randint((4,), 2, 9, draw()), jax.random.randint(key, (4,), 2, 9))
    cut = objax.random.truncated_normal((500,), stddev=2, lower=-1, upper=0.5, generator=draw())
    assert -2 <= float(cut.min()) < -1.9 and 0.9 < float(cut.max()) <= 1


def test_the_key_is_made_outside_of_the_trace_that_asks_first():
    generator = objax.random.Generator(0)
    hidden = {0: lambda: generator}

    @objax.Jit
    def draw():
        return objax.random.normal((2,), generator=hidden[0]())

    first, second = draw(), draw()
    assert isinstance(generator.key.value, jax.Array) and not isinstance(generator.key.value, jax.core.Tracer)
    wanted = objax.random.Generator(0)
    for got in (first, second):
        np.testing.assert_allclose(got, jax.random.normal(wanted(), (2,)), rtol=1e-6)


def test_a_module_made_inside_ends_there():
    def f(x):
        generator = objax.random.Generator(1)
        return x + objax.random.normal(x.shape, generator=generator)

    np.testing.assert_allclose(tether.jit(f)(jnp.zeros(3)), f(jnp.zeros(3)), rtol=1e-6)


def test_the_default_generator_makes_no_device_at_import():
    assert objax.random.DEFAULT_GENERATOR.initial_seed == 0


def test_a_generator_of_ones_own_has_its_other_variables():
    class Counted(objax.random.Generator):
        def __init__(self):
            super().__init__(3)
            self.calls = objax.StateVar(jnp.zeros(()))

        def __call__(self):
            self.calls.value = self.calls.value + 1
            return super().__call__()

    generator = Counted()
    assert list(generator.vars().keys()) == ["(Counted)._key", "(Counted).calls"]
    draw = objax.Jit(lambda: objax.random.normal((2,), generator=generator))
    draw(), draw()
    assert float(generator.calls.value) == 2 and draw._call.traces == 1
