# SPDX-License-Identifier: Apache-2.0
"""SimpleCell, GRUCell and LSTMCell against float64 NumPy, one step at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError, StructureError, TetherError
from tether.nn import GRUCell, LSTMCarry, LSTMCell, SimpleCell

RNG = np.random.default_rng(0)
ACTIVATIONS: dict[Any, Any] = {jnp.tanh: np.tanh, jax.nn.relu: lambda a: np.maximum(a, 0)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def numpy_step(cell: Any, carry: Any, x: np.ndarray) -> Any:
    """The equations of the docstrings, gate by gate, on vectors of float64."""
    W, U = np.asarray(cell.weight_ih, np.float64), np.asarray(cell.weight_hh, np.float64)
    zero = np.zeros(len(W))
    b, d = (zero if v is None else np.asarray(v, np.float64) for v in (cell.bias_ih, cell.bias_hh))
    size = cell.hidden_size
    rows = [slice(k * size, (k + 1) * size) for k in range(len(W) // size)]
    of_x = lambda k: W[rows[k]] @ x + b[rows[k]]
    of_h = lambda k, h: U[rows[k]] @ h + d[rows[k]]
    if isinstance(cell, LSTMCell):
        h, c = carry
        i, f, g, o = (of_x(k) + of_h(k, h) for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    if isinstance(cell, GRUCell):
        r, z = (sigmoid(of_x(k) + of_h(k, carry)) for k in range(2))
        n = np.tanh(of_x(2) + (r * of_h(2, carry) if cell.reset_after else of_h(2, r * carry)))
        return (1 - z) * n + z * carry
    return ACTIVATIONS[cell.activation](of_x(0) + of_h(0, carry))


def random_carry(cell: Any, *batch: int) -> Any:
    return jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), cell.init_carry(batch))


def outputs_of(carry: Any) -> Any:
    return carry[0] if isinstance(carry, tuple) else carry


MAKERS = {
    "SimpleCell": lambda **o: SimpleCell(3, 4, **o),
    "SimpleCell relu": lambda **o: SimpleCell(3, 4, jax.nn.relu, **o),
    "GRUCell": lambda **o: GRUCell(3, 4, **o),
    "GRUCell reset before": lambda **o: GRUCell(3, 4, reset_after=False, **o),
    "LSTMCell": lambda **o: LSTMCell(3, 4, **o),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
one_of_each = pytest.mark.parametrize("make", [SimpleCell, GRUCell, LSTMCell])


@makers
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_step(make: Any, use_bias: bool, key: jax.Array):
    cell = make(use_bias=use_bias, key=key)
    carry, x = random_carry(cell, 2, 5), RNG.normal(size=(2, 5, 3)).astype(np.float32)
    after, y = cell(carry, x)
    assert y.shape == (2, 5, 4) and y.dtype == jnp.float32
    np.testing.assert_array_equal(y, outputs_of(after))
    for at in np.ndindex(2, 5):
        wanted = numpy_step(cell, jax.tree.map(lambda a, at=at: np.asarray(a[at], np.float64), carry), x[at])
        for got, right in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got[at], right, rtol=1e-5, atol=1e-6)


@makers
@pytest.mark.parametrize("batch", [(), (2,), (3, 1, 2), (0,)], ids=str)
def test_any_number_of_batch_axes(make: Any, batch: tuple[int, ...], key: jax.Array):
    cell = make(key=key)
    carry, x = random_carry(cell, *batch), RNG.normal(size=(*batch, 3)).astype(np.float32)
    after, y = cell(carry, x)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, carry)
    one_by_one = cell
    for _ in batch:
        one_by_one = jax.vmap(one_by_one)
    for got, wanted in zip(jax.tree.leaves((after, y)), jax.tree.leaves(one_by_one(carry, x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@one_of_each
def test_the_projection_of_many_steps_is_that_of_each(make: Any, key: jax.Array):
    cell = make(3, 4, key=key)
    carry, xs = random_carry(cell, 2), RNG.normal(size=(5, 2, 3)).astype(np.float32)
    gates = cell.project(xs)
    assert [gate.shape for gate in gates] == [(5, 2, 4)] * (cell.weight_ih.shape[0] // 4)
    for got, wanted in zip(
        jax.tree.leaves(cell(carry, tuple(gate[3] for gate in gates), projected=True)),
        jax.tree.leaves(cell(carry, xs[3])),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "gates"), [(SimpleCell, 1), (GRUCell, 3), (LSTMCell, 4)])
def test_layout_and_first_values(make: Any, gates: int, key: jax.Array):
    cell = make(50, 64, key=key)
    shapes = {path: variable.value.shape for path, variable in tether.variables(cell).items()}
    rows = gates * 64
    assert shapes == {"weight_ih": (rows, 50), "weight_hh": (rows, 64), "bias_ih": (rows,), "bias_hh": (rows,)}
    for values in map(
        np.asarray, jax.tree.leaves(cell)
    ):  # U(-1/8, 1/8), as in PyTorch: standard deviation 1 / (8 sqrt 3)
        assert 0.115 < np.abs(values).max() <= 0.125
        assert values.std() == pytest.approx(0.125 / 3**0.5, rel=0.15)
    assert len({np.ravel(values)[0] for values in jax.tree.leaves(cell)}) == 4  # each with a key of its own
    without = make(50, 64, use_bias=False, key=key)
    assert list(tether.variables(without)) == ["weight_ih", "weight_hh"]
    np.testing.assert_array_equal(without.weight_hh, cell.weight_hh)


@one_of_each
def test_own_initializers_and_dtype(make: Any):
    cell = make(
        3,
        4,
        dtype=jnp.bfloat16,
        weight_init=nn.init.constant(0.5),
        recurrent_init=nn.init.ones,
        bias_init=nn.init.zeros,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(cell)} == {jnp.dtype(jnp.bfloat16)}
    assert set(np.ravel(cell.weight_ih.astype(jnp.float32))) == {0.5}
    assert set(np.ravel(cell.weight_hh.astype(jnp.float32))) == {1.0}
    assert not cell.bias_ih.any() and not cell.bias_hh.any()


def test_init_carry():
    carry = LSTMCell(3, 4).init_carry((2, 5))
    assert isinstance(carry, LSTMCarry)
    assert carry.h.shape == carry.c.shape == (2, 5, 4) and not any(a.any() for a in carry)
    assert carry.h.unsafe_buffer_pointer() != carry.c.unsafe_buffer_pointer()
    assert GRUCell(3, 4).init_carry().shape == (4,)
    assert GRUCell(3, 4).init_carry(2).shape == (2, 4)
    assert SimpleCell(3, 4, dtype=jnp.bfloat16).init_carry([2, 0]).dtype == jnp.float32
    assert SimpleCell(3, 4).init_carry(2, jnp.float16).dtype == jnp.float16


def test_a_carry_can_be_donated(key: jax.Array):
    cell = LSTMCell(3, 4, key=key)
    step = jax.jit(lambda cell, carry, x: cell(carry, x), donate_argnums=1)
    carry = cell.init_carry(2)
    for _ in range(2):
        carry, _ = step(cell, carry, jnp.ones((2, 3)))
    assert carry.c.shape == (2, 4)


@one_of_each
@pytest.mark.parametrize(
    ("x_dtype", "carry_dtype"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.float16),
        (jnp.int32, jnp.float32),
        (jnp.bool_, jnp.float32),
    ],
)
def test_the_carry_keeps_its_dtype_and_y_has_that_of_x(make: Any, x_dtype: Any, carry_dtype: Any, key: jax.Array):
    cell = make(3, 4, key=key)
    x = jnp.asarray(RNG.normal(size=(2, 3))).astype(x_dtype)
    carry, y = cell(cell.init_carry(2, carry_dtype), x)
    assert y.dtype == (x_dtype if jnp.issubdtype(x_dtype, jnp.floating) else jnp.float32)
    assert {a.dtype for a in jax.tree.leaves(carry)} == {jnp.dtype(carry_dtype)}
    wide = cell(cell.init_carry(2), x.astype(jnp.float32))[1]
    np.testing.assert_allclose(y.astype(jnp.float32), wide, atol=0.03)


def test_a_memory_in_float32_adds_what_float16_would_lose():
    """c' = c + 1 at c = 2048: float16 has no 2049."""
    big = lambda key, shape, dtype: jnp.full(shape, 50.0, dtype)
    cell = LSTMCell(1, 1, weight_init=nn.init.zeros, recurrent_init=nn.init.zeros, bias_init=big)
    carry = LSTMCarry(jnp.zeros(1), jnp.full(1, 2048.0))
    carry, _ = cell(carry, jnp.ones(1, jnp.float16))
    assert float(carry.c[0]) == 2049.0


@pytest.mark.parametrize("make", [GRUCell, LSTMCell])
def test_float64(make: Any, key: jax.Array):
    cell = make(3, 4, key=key)
    carry, x = jax.tree.map(lambda a: RNG.normal(size=a.shape), cell.init_carry()), RNG.normal(size=3)
    with jax.enable_x64(True):
        after, y = tether.jit(cell)(carry, x)
    assert y.dtype == jnp.float64
    for got, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(numpy_step(cell, carry, x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


@one_of_each
def test_numpy_of_64_bits_is_taken_as_float32(make: Any, key: jax.Array):
    cell = make(3, 4, key=key)
    carry = jax.tree.map(lambda a: np.asarray(a, np.float64), random_carry(cell, 2))
    x = RNG.normal(size=(2, 3))
    after, y = cell(carry, x)
    assert {a.dtype for a in jax.tree.leaves((after, y))} == {jnp.dtype(jnp.float32)}


def test_compute_dtype(key: jax.Array):
    cell = tether.view(GRUCell(3, 4, key=key), compute_dtype=jnp.bfloat16)
    carry, y = cell(cell.init_carry(2), jnp.ones((2, 3)))
    assert (carry.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)


@makers
def test_jit_grad_and_vmap(make: Any, key: jax.Array):
    cell = make(key=key)
    carry, x = random_carry(cell, 2), RNG.normal(size=(2, 3)).astype(np.float32)
    eager = cell(carry, x)
    for got in (tether.jit(cell)(carry, x), jax.jit(cell)(carry, x), tether.vmap(cell)(carry, x)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(eager), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    weights, direction = RNG.normal(size=(2, 4)), RNG.normal(size=(2, 3))
    grad = tether.grad(lambda x: (jnp.asarray(weights, jnp.float32) * cell(carry, x)[1]).sum())(x)

    def loss(x: np.ndarray) -> float:
        rows = [numpy_step(cell, jax.tree.map(lambda a, i=i: np.float64(a[i]), carry), x[i]) for i in range(2)]
        return sum((w * outputs_of(row)).sum() for w, row in zip(weights, rows, strict=True))

    slope = (loss(x + 1e-4 * direction) - loss(x - 1e-4 * direction)) / 2e-4
    assert float((np.asarray(grad) * direction).sum()) == pytest.approx(slope, rel=1e-2, abs=1e-3)


def test_an_activation_may_be_a_module(key: jax.Array):
    class Scaled(tether.Module):
        def __init__(self):
            self.scale = tether.Param(jnp.asarray(2.0))

        def __call__(self, x):
            return self.scale * jnp.tanh(x)

    cell = SimpleCell(3, 4, Scaled(), key=key)
    assert "activation.scale" in tether.variables(cell)
    plain = SimpleCell(3, 4, key=key)
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(cell(cell.init_carry(2), x)[1], 2 * plain(plain.init_carry(2), x)[1], rtol=1e-6)


def lines(error: pytest.ExceptionInfo[TetherError]) -> list[str]:
    return str(error.value).splitlines()


def test_a_wrong_input_size_says_what_to_do():
    with pytest.raises(ShapeError) as caught:
        LSTMCell(3, 4)(LSTMCell(3, 4).init_carry(2), jnp.ones((2, 5)))
    assert lines(caught) == [
        "LSTMCell: the last axis of x is not input_size, 3.",
        "  at:       the module itself  (LSTMCell)",
        "  got:      float32[2, 5]",
        "  expected: [..., 3]",
        "  fix:      LSTMCell(5, 4)",
    ]


@pytest.mark.parametrize("shape", [(4,), (2, 5), (1, 4), (2, 1, 4), (2,), (2, 1)], ids=str)
def test_a_carry_of_another_shape_says_what_to_do(shape: tuple[int, ...]):
    with pytest.raises(ShapeError) as caught:
        GRUCell(3, 4)(jnp.ones(shape), jnp.ones((2, 3)))
    assert lines(caught) == [
        "GRUCell: the shape of the carry is not (*batch, 4), with the batch axes of x.",
        "  at:       the module itself  (GRUCell)",
        f"  got:      the carry float32[{', '.join(map(str, shape))}], and x with batch axes (2,)",
        "  expected: [2, 4]",
        "  fix:      cell.init_carry((2,)) to begin with",
    ]


def test_the_part_of_a_carry_is_named():
    cell = LSTMCell(3, 4)
    with pytest.raises(ShapeError, match="LSTMCell: the shape of c in the carry"):
        cell(LSTMCarry(jnp.ones((2, 4)), jnp.ones((1, 4))), jnp.ones((2, 3)))


@pytest.mark.parametrize("carry", [jnp.ones((2, 4), jnp.int32), jnp.ones((2, 4), jnp.complex64), None, 0.0, [1.0]])
def test_a_carry_that_is_not_floating_says_what_to_do(carry: Any):
    with pytest.raises(DtypeError) as caught:
        SimpleCell(3, 4)(carry, jnp.ones((2, 3)))
    assert lines(caught)[0] == "SimpleCell: the carry is not a floating array."
    assert lines(caught)[3:] == ["  expected: float[2, 4]", "  fix:      cell.init_carry((2,)) to begin with"]


def test_an_lstm_wants_its_named_pair():
    carry = jnp.ones((2, 4)), jnp.ones((2, 4))
    with pytest.raises(StructureError) as caught:
        LSTMCell(3, 4)(carry, jnp.ones((2, 3)))
    assert lines(caught) == [
        "LSTMCell: the carry is not an LSTMCarry.",
        "  at:       the module itself  (LSTMCell)",
        "  got:      tuple of 2",
        "  expected: nn.LSTMCarry(h, c), named because libraries differ in the order",
        "  fix:      one of",
        "    1. nn.LSTMCarry(h=..., c=...)",
        "    2. cell.init_carry((2,)) to begin with",
    ]
    with pytest.raises(DtypeError, match="GRUCell: the carry is not a floating array"):
        GRUCell(3, 4)(LSTMCarry(*carry), jnp.ones((2, 3)))


@pytest.mark.parametrize("x", [jnp.ones((2, 3)), (jnp.ones((2, 4)),) * 2, (jnp.ones((2, 12)),), ()])
def test_what_is_no_projection_says_so(x: Any):
    with pytest.raises(ShapeError) as caught:
        GRUCell(3, 4)(jnp.ones((2, 4)), x, projected=True)
    assert lines(caught)[0] == "GRUCell: projected=True, and x is not a projection."
    assert lines(caught)[3] == "  expected: 3 of float[..., 4], as cell.project gives them"


@one_of_each
def test_complex_numbers_are_refused(make: Any):
    cell = make(3, 4)
    with pytest.raises(DtypeError, match=f"{make.__name__}: its gates are functions of real numbers") as caught:
        cell(cell.init_carry(2), jnp.ones((2, 3), jnp.complex64))
    assert caught.value.got == "complex64[2, 3]"
    with pytest.raises(DtypeError, match="gates are functions of real numbers") as caught:
        tether.view(cell, compute_dtype=jnp.complex64)(cell.init_carry(2), jnp.ones((2, 3)))
    assert caught.value.got == "float32[2, 3], compute_dtype=complex64"
    with pytest.raises(ArgumentError, match=f"{make.__name__}: dtype is complex"):
        make(3, 4, dtype=jnp.complex64)


@one_of_each
def test_arguments_are_checked(make: Any):
    for bad in (0, -1, 2.5, True, None):
        with pytest.raises(ArgumentError, match=f"{make.__name__}: input_size is not an integer of at least 1"):
            make(bad, 4)
        with pytest.raises(ArgumentError, match="hidden_size is not an integer of at least 1"):
            make(3, bad)
    with pytest.raises(ArgumentError, match="dtype is not a floating dtype"):
        make(3, 4, dtype=jnp.int32)
    with pytest.raises(ShapeError, match="recurrent_init gave another shape"):
        make(3, 4, recurrent_init=lambda key, shape, dtype: jnp.ones(shape[::-1], dtype)[:1])
    with pytest.raises(ArgumentError, match="batch_shape is not an integer of at least 0"):
        make(3, 4).init_carry((2, -1))
    with pytest.raises(ArgumentError, match="batch_shape"):
        make(3, 4).init_carry(2.0)
    with pytest.raises(ArgumentError, match="dtype is not a floating dtype"):
        make(3, 4).init_carry(2, jnp.int32)


@pytest.mark.parametrize("activation", ["tanh", None, nn.Identity])
def test_activation_can_be_called(activation: Any):
    with pytest.raises(ArgumentError) as caught:
        SimpleCell(3, 4, activation)
    assert lines(caught)[0] == "SimpleCell: activation can't be called with an array."


@one_of_each
def test_x_is_an_array(make: Any):
    cell = make(3, 4)
    with pytest.raises(DtypeError, match="the input is not an array of numbers"):
        cell(cell.init_carry(), [1.0, 2.0, 3.0])
    with pytest.raises(ShapeError, match="the last axis of x is not input_size"):
        cell(cell.init_carry(), jnp.float32(1))
