# SPDX-License-Identifier: Apache-2.0
"""One traced program: inputs and outputs are only what is used, retraces end, no tracer stays."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import LeakError, MissedReadWarning


def inputs(step, *args) -> int:
    return len(jax.tree.leaves(step.lower(*args).in_avals))


def test_only_what_is_used_is_passed():
    models = [nn.Linear(2, 2) for _ in range(10)]
    step = tether.jit(lambda models, x: models[3](x))
    np.testing.assert_allclose(step(models, jnp.ones(2)), models[3](jnp.ones(2)), rtol=1e-6)
    assert inputs(step, models, jnp.ones(2)) == 3  # weight, bias, x


def test_only_what_is_written_is_returned():
    model = nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2)])
    step = tether.jit(lambda model, x: model(x))
    shapes = jax.tree.leaves(step.lower(model, np.ones((4, 2), np.float32)).out_info)
    assert len(shapes) == 3  # mean, var, y
    shapes = jax.tree.leaves(step.lower(model.eval(), np.ones((4, 2), np.float32)).out_info)
    assert len(shapes) == 1


def test_write_of_the_same_value_and_swap():
    a, b = tether.State(1.0), tether.State(2.0)

    @tether.jit
    def swap():
        a.value, b.value = b.value, a.value

    swap()
    assert (float(a.value), float(b.value)) == (2.0, 1.0)
    swap()
    assert (float(a.value), float(b.value)) == (1.0, 2.0)
    assert swap.traces == 1


@pytest.mark.parametrize("donate", [False, True], ids=["keeping", "donating"])
def test_what_is_put_back_is_not_written(donate):
    """Other values for the length of a call: an average in place of the weights."""
    weight, average = tether.State(jnp.ones(3)), tether.State(jnp.full(3, 2.0))

    @tether.jit(donate_state=donate)
    def with_average(x):
        before, weight.value = weight.value, average.value
        y = (weight.value * x).sum()
        weight.value = before
        return y

    for _ in range(2):
        assert float(with_average(3.0)) == 18 and weight.value.tolist() == [1, 1, 1]
    assert with_average.writes == ()
    assert len(jax.tree.leaves(with_average.lower(3.0).out_info)) == 1


def test_chain_of_missed_reads_ends():
    cells = [tether.State(float(i)) for i in range(3)]
    hidden = types.MappingProxyType({"cells": cells})
    step = tether.jit(lambda: sum(cell.value for cell in hidden["cells"]))
    with pytest.warns(MissedReadWarning):
        assert float(step()) == 3.0
    assert step.traces == 2  # one trace finds them all
    cells[2].value = 10.0
    assert float(step()) == 11.0


def test_new_variables_at_each_trace_are_an_error():
    hidden = types.MappingProxyType(store := {})
    count = iter(range(100))

    def f(x):
        with jax.ensure_compile_time_eval():
            pass
        index = next(count)
        return hidden[index].value * x

    for index in range(100):
        store[index] = tether.State(1.0)
    with pytest.raises(LeakError, match="traces"):
        tether.jit(f)(1.0)


def test_modules_made_inside_are_not_missed():
    @tether.jit
    def f(x):
        linear = nn.Linear(2, 1, key=jax.random.key(0))
        linear.bias = linear.bias + 1
        gradient = tether.grad(lambda m: m(x).sum())(linear)
        return linear(x) + gradient.bias[None]  # which is 3, for three rows

    right = nn.Linear(2, 1, key=jax.random.key(0))(np.ones((3, 2), np.float32)) + 4
    for _ in range(2):
        np.testing.assert_allclose(f(np.ones((3, 2), np.float32)), right, rtol=1e-5)
    assert f.traces == 1


def test_constants_of_a_program():
    table = jnp.arange(4.0)
    step = tether.jit(lambda i: table[i])
    assert [float(step(i)) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert step.traces == 1


def test_smuggled_tracer_is_jaxs_error_and_leaves_state_alone():
    model, kept = nn.BatchNorm(2), []

    @tether.jit
    def f(x):
        kept.append(x)
        return model(x)

    f(np.ones((3, 2), np.float32) * np.arange(3, dtype=np.float32)[:, None])
    with pytest.raises(jax.errors.UnexpectedTracerError):
        _ = kept[0] + 1
    np.testing.assert_allclose(model.mean, [0.1, 0.1], rtol=1e-5)


def test_smuggled_module_raises_with_its_birthplace():
    kept = []

    @tether.jit
    def f(x):
        linear = nn.Linear(2, 1, key=jax.random.key(0))
        linear.weight = linear.weight * x
        kept.append(linear)
        return linear.bias

    f(2.0)
    with pytest.raises(LeakError, match=r"(?s)weight.*test_program\.py"):
        _ = kept[0].weight
