# SPDX-License-Identifier: Apache-2.0
"""RNN and Bidirectional against loops in float64 NumPy, one row at a time, and cells that a user writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.nn.test_cells import numpy_step, outputs_of, random_carry
from tether import nn
from tether.nn import RNN, Bidirectional, GRUCell, LSTMCarry, LSTMCell, SimpleCell

RNG = np.random.default_rng(1)
LENGTHS = np.asarray([5, 3, 0], np.int32)
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def sequences(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def numpy_rnn(cell: Any, x: np.ndarray, carry: Any, length: int, reverse: bool) -> tuple[Any, np.ndarray]:
    """One row: over the steps within the length, in their order or from the last one to the first."""
    carry = jax.tree.map(lambda a: np.asarray(a, np.float64), carry)
    y = np.zeros((len(x), cell.hidden_size))
    for t in range(length)[:: -1 if reverse else 1]:
        carry = numpy_step(cell, carry, x[t])
        y[t] = outputs_of(carry)
    return carry, y


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "reverse", "lengths"),
    [
        (LSTMCell, False, None),
        (LSTMCell, False, LENGTHS),
        (LSTMCell, True, LENGTHS),
        (GRUCell, True, LENGTHS),
        (SimpleCell, True, None),
    ],
)
def test_values(make: Any, reverse: bool, lengths: Any, key: jax.Array):
    rnn = RNN(make(3, 4, key=key), reverse=reverse)
    x, carry = sequences(3, 5, 3), random_carry(rnn.cell, 3)
    after, y = rnn(x, carry, lengths=lengths, return_carry=True)
    assert y.shape == (3, 5, 4)
    for row, length in enumerate([5, 5, 5] if lengths is None else lengths):
        at = lambda a, row=row: a[row]
        wanted, right = numpy_rnn(rnn.cell, x[row], jax.tree.map(at, carry), length, reverse)
        close(y[row], right)
        close(jax.tree.map(at, after), wanted)
    if lengths is not None:
        assert not y[1, 3:].any() and not y[2].any()
        close(jax.tree.map(lambda a: a[2], after), jax.tree.map(lambda a: a[2], carry), 0)


def test_the_carry_begins_with_zeros_and_y_comes_alone(key: jax.Array):
    rnn = RNN(LSTMCell(3, 4, key=key))
    x = sequences(2, 4, 3)
    carry, y = rnn(x, rnn.cell.init_carry(2), return_carry=True)
    close(rnn(x), y, 0)
    assert isinstance(carry, LSTMCarry)
    close(carry.h, y[:, -1], 0)


def test_two_halves_are_the_whole(key: jax.Array):
    rnn = RNN(SimpleCell(3, 4, key=key))
    x = sequences(2, 6, 3)
    carry, first = rnn(x[:, :2], return_carry=True)
    close(np.concatenate([first, rnn(x[:, 2:], carry)], 1), rnn(x))


@pytest.mark.parametrize("batch", [(), (2, 1, 3), (0,)], ids=str)
def test_any_number_of_batch_axes(batch: tuple[int, ...], key: jax.Array):
    rnn = RNN(SimpleCell(3, 4, key=key), reverse=True)
    x = sequences(*batch, 5, 3)
    lengths = np.asarray(RNG.integers(0, 6, batch), np.int8)
    y = rnn(x, lengths=lengths)
    assert y.shape == (*batch, 5, 4)
    for row in np.ndindex(*batch):
        close(y[row], numpy_rnn(rnn.cell, x[row], np.zeros(4), int(lengths[row]), True)[1])


@pytest.mark.parametrize("lengths", [None, np.zeros(2, np.int32)], ids=["full", "lengths"])
def test_no_steps(lengths: Any, key: jax.Array):
    model = Bidirectional(RNN(LSTMCell(3, 4, key=key)), RNN(GRUCell(3, 4, key=key), reverse=True))
    carry = random_carry(model.forward.cell, 2), random_carry(model.backward.cell, 2)
    for run in (model, tether.jit(model, static_argnames="return_carry")):
        after, y = run(jnp.ones((2, 0, 3)), carry, lengths=lengths, return_carry=True)
        assert y.shape == (2, 0, 8) and y.dtype == jnp.float32
        close(after, carry, 0)


def test_the_padding_is_not_read(key: jax.Array):
    """NaN there reaches neither values nor gradients."""
    model = Bidirectional(RNN(SimpleCell(3, 4, key=key)), RNN(LSTMCell(3, 4, key=key), reverse=True))
    x, weights = sequences(3, 5, 3), sequences(3, 5, 8)
    loss = lambda model, x: (weights * model(x, lengths=LENGTHS)).sum()
    step = tether.jit(tether.value_and_grad(loss, argnums=(0, 1)))
    valid = np.arange(5)[None, :, None] < LENGTHS[:, None, None]
    clean, soiled = (step(model, np.where(valid, x, np.float32(padding))) for padding in (0, np.nan))
    close(soiled, clean, 0)
    assert np.isfinite(clean[0]) and not clean[1][1][1, 3:].any()


def test_gradients_agree_with_float64_differences(key: jax.Array):
    rnn = RNN(LSTMCell(3, 4, key=key), reverse=True)
    x, carry, weights = sequences(3, 5, 3), random_carry(rnn.cell, 3), sequences(3, 5, 4)
    dx, dc = sequences(3, 5, 3), sequences(3, 4)

    def loss(x: Any, c: Any) -> Any:
        return (weights * rnn(x, LSTMCarry(carry.h, c), lengths=LENGTHS)).sum()

    def of_numpy(step: float) -> float:
        return sum(
            (w * numpy_rnn(rnn.cell, x + step * a, (h, c + step * b), n, True)[1]).sum()
            for w, x, h, c, a, b, n in zip(*map(np.float64, (weights, x, *carry, dx, dc)), LENGTHS, strict=True)
        )

    of_x, of_c = tether.jit(tether.grad(loss, argnums=(0, 1)))(x, carry.c)
    assert float((of_x * dx).sum() + (of_c * dc).sum()) == pytest.approx(
        (of_numpy(1e-5) - of_numpy(-1e-5)) / 2e-5, rel=1e-3
    )


def test_the_input_is_projected_once_for_all_steps(key: jax.Array):
    """One product of the whole of x before the loop, and one of the carry in it."""
    products = [
        line.split(" = ")[0].split(":")[-1]
        for line in str(tether.make_jaxpr(RNN(LSTMCell(3, 4, key=key)))(jnp.ones((2, 7, 3)))).splitlines()
        if "dot_general" in line
    ]
    assert sorted(products) == ["f32[2,16]", "f32[2,7,16]"]


def test_python_of_the_cell_runs_once(key: jax.Array):
    calls = []

    class Noted(GRUCell):
        def __call__(self, carry, x, *, projected=False):
            calls.append(projected)
            return super().__call__(carry, x, projected=projected)

    rnn = RNN(Noted(3, 4, key=key))
    tether.jit(rnn)(jnp.ones((2, 50, 3)))
    assert calls == [True]


def test_a_cell_that_does_not_take_projections_gets_x(key: jax.Array):
    class Doubled(GRUCell):
        def __call__(self, carry, x):
            return super().__call__(carry, 2 * x)

    x = sequences(2, 4, 3)
    close(RNN(Doubled(3, 4, key=key))(x), RNN(GRUCell(3, 4, key=key))(2 * x))


def test_unroll_and_disable_jit_change_nothing(key: jax.Array):
    x, lengths = sequences(2, 3, 3), np.asarray([3, 2])
    plain = RNN(SimpleCell(3, 4, key=key))(x, lengths=lengths)
    for unroll in (2, True):
        close(RNN(SimpleCell(3, 4, key=key), unroll=unroll)(x, lengths=lengths), plain)
    with jax.disable_jit():
        close(RNN(SimpleCell(3, 4, key=key))(x, lengths=lengths), plain)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32], ids=lambda dtype: dtype.__name__)
def test_dtypes(dtype: Any, key: jax.Array):
    rnn = RNN(LSTMCell(3, 4, key=key))
    x = jnp.asarray(3 * sequences(2, 5, 3)).astype(dtype)
    carry, y = rnn(x, lengths=LENGTHS[:2], return_carry=True)
    assert y.dtype == (jnp.float16 if dtype == jnp.float16 else jnp.float32)
    assert carry.c.dtype == carry.h.dtype == jnp.float32
    close(y.astype(jnp.float32), rnn(x.astype(jnp.float32), lengths=LENGTHS[:2]), 2e-2)


def test_float64_is_float64_in_the_carry_too(key: jax.Array):
    rnn = RNN(GRUCell(3, 4, key=key))
    x = RNG.normal(size=(2, 5, 3))
    with jax.enable_x64(True):
        carry, y = rnn(x, return_carry=True)
        assert carry.dtype == y.dtype == jnp.float64
        np.testing.assert_allclose(y[1], numpy_rnn(rnn.cell, x[1], np.zeros(4), 5, False)[1], rtol=1e-12)


# Bidirectional and several layers


def test_bidirectional(key: jax.Array):
    model = Bidirectional(RNN(LSTMCell(3, 4, key=key)), RNN(SimpleCell(3, 2), reverse=True))
    x = sequences(3, 5, 3)
    start = random_carry(model.forward.cell, 3), random_carry(model.backward.cell, 3)
    (there, back), y = model(x, start, lengths=LENGTHS, return_carry=True)
    for row, length in enumerate(LENGTHS):
        at = lambda a, row=row: a[row]
        first, second = (jax.tree.map(at, carry) for carry in start)
        wanted_there, y_there = numpy_rnn(model.forward.cell, x[row], first, length, False)
        wanted_back, y_back = numpy_rnn(model.backward.cell, x[row], second, length, True)
        close(y[row], np.concatenate([y_there, y_back], -1))
        close((jax.tree.map(at, there), jax.tree.map(at, back)), (wanted_there, wanted_back))


def test_merge(key: jax.Array):
    forward, backward = RNN(SimpleCell(3, 4, key=key)), RNN(SimpleCell(3, 4), reverse=True)
    x = sequences(2, 5, 3)
    close(Bidirectional(forward, backward, merge=jnp.add)(x), forward(x) + backward(x))


def test_one_cell_for_both_directions_is_tied(key: jax.Array):
    cell = GRUCell(3, 4, key=key)
    model = Bidirectional(RNN(cell), RNN(cell, reverse=True))
    assert len(tether.variables(model)) == 4


def test_layers_on_top_of_each_other(key: jax.Array):
    first, second = RNN(LSTMCell(3, 4, key=key)), RNN(GRUCell(4, 2, key=key))
    x = sequences(5, 3)
    _, between = numpy_rnn(first.cell, x, (np.zeros(4), np.zeros(4)), 5, False)
    close(nn.Sequential([first, second])(x), numpy_rnn(second.cell, between, np.zeros(2), 5, False)[1])


# Cells of a user


class Accumulator(tether.Module):
    """y is the sum so far of what Dropout lets pass; counts the steps."""

    def __init__(self, p=0.0):
        self.dropout = nn.Dropout(p)
        self.steps = tether.State(0)

    def init_carry(self, batch_shape):
        return jnp.zeros((*batch_shape, 3))

    def __call__(self, carry, x):
        self.steps = self.steps + 1
        carry = carry + self.dropout(x)
        return carry, carry


@directions
def test_a_cell_of_a_user(reverse: bool):
    rnn = RNN(Accumulator(), reverse=reverse)
    x = sequences(2, 5, 3)
    order = x[:, ::-1] if reverse else x
    sums = np.cumsum(order, 1)
    close(rnn(x), sums[:, ::-1] if reverse else sums)
    assert int(rnn.cell.steps) == 5
    tether.jit(rnn)(x)
    assert int(rnn.cell.steps) == 10
    carry, y = rnn(x, lengths=np.asarray([2, 5]), return_carry=True)
    close(carry, np.stack([x[0, :2].sum(0), x[1].sum(0)]))
    assert not y[0, 2:].any()
    assert int(rnn.cell.steps) == 15


def test_dropout_in_a_cell_draws_anew_in_each_step(key: jax.Array):
    rnn = RNN(Accumulator(0.5))
    x = jnp.ones((64, 3))
    run = tether.jit(lambda key: rnn(x, key=key))
    kept = np.diff(run(key), axis=0)
    assert 0.3 < float((kept == 0).mean()) < 0.7
    assert len(np.unique(kept, axis=0)) == 8  # of the 8 patterns
    close(run(key), run(key), 0)
    assert not np.array_equal(rnn(x), rnn(x))
    close(rnn(x, training=False), np.cumsum(x, 0))


def test_a_cell_with_a_tree_for_carry_and_output():
    class Pairs(tether.Module):
        def init_carry(self, batch_shape):
            return {"sum": jnp.zeros((*batch_shape, 2, 2)), "steps": jnp.zeros(batch_shape, jnp.int32)}

        def __call__(self, carry, x):
            carry = {"sum": carry["sum"] + x, "steps": carry["steps"] + 1}
            return carry, (carry["steps"], {"mean": carry["sum"].mean((-2, -1))})

    rnn = RNN(Pairs(), time_axis=-3)
    x = sequences(3, 5, 2, 2)
    carry, (steps, out) = rnn(x, lengths=LENGTHS, return_carry=True)
    np.testing.assert_array_equal(carry["steps"], LENGTHS)
    np.testing.assert_array_equal(steps, [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0], [0] * 5])
    close(carry["sum"], np.stack([x[0].sum(0), x[1, :3].sum(0), np.zeros((2, 2))]))
    close(out["mean"][0], np.cumsum(x[0], 0).mean((-2, -1)))


def test_a_cell_without_output():
    class Last(Accumulator):
        def __call__(self, carry, x):
            return x, None

    x = sequences(2, 5, 3)
    carry, y = RNN(Last())(x, return_carry=True)
    assert y is None
    close(carry, x[:, -1], 0)


# Transformations


def test_under_jit_grad_vmap_and_checkpoint(key: jax.Array):
    model = RNN(GRUCell(3, 4, key=key), reverse=True)
    x, weights = sequences(3, 5, 3), sequences(3, 5, 4)
    call = lambda model, x, n: model(x, lengths=n)
    y = model(x, lengths=LENGTHS)
    close(tether.jit(call)(model, x, LENGTHS), y)
    close(jax.jit(call)(model, x, LENGTHS), y)
    close(tether.vmap(call, in_axes=(None, 0, 0))(model, x, LENGTHS), y)
    close(jax.vmap(lambda x, n: model(x, lengths=n))(x, LENGTHS), y)
    loss = lambda run: lambda model, x: (weights * run(model, x, LENGTHS)).sum()
    grads = tether.jit(tether.grad(loss(call), argnums=(0, 1)))(model, x)
    close(tether.jit(tether.grad(loss(tether.checkpoint(call)), argnums=(0, 1)))(model, x), grads)
    close(jax.jit(jax.grad(lambda x: loss(call)(model, x)))(x), grads[1])


def test_lengths_of_a_lane_and_beyond_the_range_are_traced(key: jax.Array):
    rnn = RNN(SimpleCell(3, 4, key=key))
    x = sequences(2, 5, 3)
    run = tether.jit(lambda n: rnn(x, lengths=n))
    close(run(jnp.asarray([9, -2])), rnn(x, lengths=jnp.asarray([5, 0])))


def test_an_ensemble(key: jax.Array):
    members = [RNN(SimpleCell(3, 4, key=k)) for k in jax.random.split(key, 2)]
    x = sequences(5, 3)
    ys = tether.vmap(lambda rnn, x: rnn(x), in_axes=(0, None))(tether.stack(members), x)
    close(ys, np.stack([numpy_rnn(member.cell, x, np.zeros(4), 5, False)[1] for member in members]))


def test_what_cells_give_can_be_captured(key: jax.Array):
    rnn = RNN(LSTMCell(3, 4, key=key))
    y, inside = tether.capture(rnn, LSTMCell)(sequences(2, 5, 3))
    carry, out = inside["cell"]
    close(jnp.moveaxis(out, 0, 1), y, 0)
    assert carry.c.shape == (5, 2, 4)


def test_lengths_that_a_jitted_function_closes_over(key: jax.Array):
    rnn, x, lengths = RNN(SimpleCell(2, 3, key=key)), jnp.ones((2, 4, 2)), jnp.asarray([4, 2])
    y = tether.jit(lambda rnn: rnn(x, lengths=lengths))(rnn)
    np.testing.assert_array_equal(y[1, 2:], np.zeros((2, 3)))
