# SPDX-License-Identifier: Apache-2.0
"""What RNN and Bidirectional refuse, and what they say."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError, StructureError, TetherError
from tether.nn import RNN, Bidirectional, GRUCell, LSTMCell

LENGTHS = np.asarray([5, 3, 0], np.int32)


def lines(error: pytest.ExceptionInfo[TetherError]) -> list[str]:
    return str(error.value).splitlines()


def test_a_wrong_feature_size_names_the_cell():
    with pytest.raises(ShapeError) as caught:
        RNN(LSTMCell(3, 4))(jnp.ones((2, 7, 5)))
    assert lines(caught)[0] == "LSTMCell: the last axis of x is not input_size, 3."
    assert lines(caught)[2] == "  got:      float32[2, 7, 5]"


def test_too_few_axes_say_what_to_do():
    with pytest.raises(ShapeError) as caught:
        RNN(LSTMCell(3, 4))(jnp.ones(3))
    assert lines(caught) == [
        "RNN: x has no axis -2, which is that of time.",
        "  at:       the module itself  (RNN)",
        "  got:      float32[3]",
        "  expected: 2 axes or more: batch axes, time, 1 of one step",
        "  fix:      one of",
        "    1. x[None, ...]",
        "    2. cell(carry, x) for a single step",
    ]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_wrong_carry_names_the_cell(lengths: Any, jit: bool):
    rnn = RNN(GRUCell(3, 4))
    run = tether.jit(rnn) if jit else rnn
    x = jnp.ones((3, 5, 3))
    with pytest.raises(ShapeError, match="GRUCell: the shape of the carry is not") as caught:
        run(x, jnp.ones((1, 4)), lengths=lengths)
    assert caught.value.at == "cell  (GRUCell)"
    with pytest.raises(DtypeError, match="GRUCell: the carry is not a floating array"):
        run(x, jnp.ones((3, 4), jnp.int32), lengths=lengths)
    with pytest.raises(DtypeError, match="GRUCell: the carry is not a floating array"):
        run(x, (jnp.ones((3, 4)),), lengths=lengths)


@pytest.mark.parametrize("lengths", [[5, 3, 0], jnp.asarray([5.0, 3, 0]), jnp.ones(3, bool), 3])
def test_lengths_are_integers(lengths: Any):
    with pytest.raises(DtypeError) as caught:
        RNN(GRUCell(3, 4))(jnp.ones((3, 5, 3)), lengths=lengths)
    assert lines(caught)[0] == "RNN: lengths are not an array of integers."
    assert lines(caught)[3:] == [
        "  expected: int[3], one for each row of x",
        "  fix:      one of",
        "    1. jnp.asarray([3, 5])",
        "    2. mask.sum(-1), if they are a mask of the steps",
    ]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (3, 5)], ids=str)
def test_lengths_have_the_batch_axes(shape: tuple[int, ...]):
    with pytest.raises(ShapeError) as caught:
        RNN(GRUCell(3, 4))(jnp.ones((3, 5, 3)), lengths=jnp.ones(shape, jnp.int32))
    sizes = ", ".join(map(str, shape))
    assert lines(caught) == [
        "RNN: lengths don't have the batch axes of x.",
        "  at:       the module itself  (RNN)",
        f"  got:      lengths int32[{sizes}], x float32[3, 5, 3] with time on axis -2",
        "  expected: int[3], one for each row of x",
        "  fix:      jnp.full((3,), 5) for rows that are all of full length",
    ]


@pytest.mark.parametrize(("values", "found"), [([0, 6, 5], "0 to 6"), ([-1, 2, 5], "-1 to 5")])
def test_a_known_length_out_of_range_says_what_to_do(values: list[int], found: str):
    with pytest.raises(ArgumentError) as caught:
        RNN(GRUCell(3, 4))(jnp.ones((3, 5, 3)), lengths=np.asarray(values))
    assert lines(caught) == [
        "RNN: a length is outside the time axis of x.",
        "  at:       the module itself  (RNN)",
        f"  got:      lengths int64[3] from {found}, x float32[3, 5, 3]",
        "  expected: lengths from 0 to 5",
        "  fix:      jnp.clip(lengths, 0, 5)",
    ]


class Returns(tether.Module):
    """A cell that returns what a function does."""

    def __init__(self, fn):
        self.fn = fn

    def init_carry(self, batch_shape):
        return jnp.zeros((*batch_shape, 3))

    def __call__(self, carry, x):
        return self.fn(carry, x)


def test_a_cell_that_returns_no_pair():
    for out in (lambda c, x: c, lambda c, x: (c, x, x)):
        with pytest.raises(StructureError) as caught:
            RNN(Returns(out))(jnp.ones((2, 5, 3)))
        assert lines(caught)[0] == "RNN: the cell doesn't return a pair."
        assert lines(caught)[2].endswith("from Returns")


def test_a_cell_whose_output_lacks_the_batch():
    for out in (lambda c, x: (c, x.sum()), lambda c, x: (c, x.mT)):
        with pytest.raises(ShapeError) as caught:
            RNN(Returns(out))(jnp.ones((2, 5, 3)))
        assert lines(caught)[0] == "RNN: y of the cell doesn't begin with the batch axes of x."
        assert lines(caught)[3:] == [
            "  expected: [2, ...]",
            "  fix:      tether.scan(cell, carry, x), which asks for no batch axes",
        ]


@pytest.mark.parametrize("lengths", [None, np.asarray([5, 3])], ids=["full", "lengths"])
@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (lambda c, x: (c[:, :1], x), ShapeError, "scan: the body changes the shape of the carry"),
        (lambda c, x: (c.astype(jnp.float16), x), DtypeError, "scan: the body changes the dtype of the carry"),
        (lambda c, x: ((c, c), x), StructureError, "scan: the body changes the structure of the carry"),
    ],
)
def test_a_cell_that_changes_the_carry(out: Any, error: Any, text: str, lengths: Any):
    with pytest.raises(error, match=text):
        RNN(Returns(out))(jnp.ones((2, 5, 3)), lengths=lengths)


def test_a_carry_without_batch_axes_has_no_lengths():
    rnn = RNN(Returns(lambda c, x: (c + 1, x)))
    x = jnp.ones((2, 5, 3))
    assert int(rnn(x, jnp.asarray(0), return_carry=True)[0]) == 5
    with pytest.raises(ShapeError) as caught:
        rnn(x, jnp.asarray(0), lengths=np.asarray([5, 3]))
    assert lines(caught)[0] == "RNN: with lengths, the carry of the cell doesn't begin with the batch axes of x."


@pytest.mark.parametrize(
    "cell",
    [GRUCell, None, nn.Linear(3, 4), lambda c, x: (c, x), "lstm"],
    ids=["class", "None", "layer", "function", "text"],
)
def test_what_is_no_cell(cell: Any):
    with pytest.raises(ArgumentError) as caught:
        RNN(cell)
    assert lines(caught)[0] == "RNN: cell is not a recurrent cell."
    assert lines(caught)[-1] == "  fix:      nn.RNN(nn.LSTMCell(input_size, hidden_size))"


def test_numbers_are_checked():
    for unroll in (0, -1, 1.5, None):
        with pytest.raises(ArgumentError, match="RNN: unroll is not an integer of at least 1"):
            RNN(GRUCell(3, 4), unroll=unroll)
    for axis in (0, 1, None, True, -2.0):
        with pytest.raises(ArgumentError, match="RNN: time_axis is not an axis counted from the end"):
            RNN(GRUCell(3, 4), time_axis=axis)


def test_x_is_an_array():
    with pytest.raises(DtypeError, match="RNN: the input is not an array of numbers"):
        RNN(GRUCell(3, 4))([[1.0, 2.0, 3.0]])


def test_bidirectional_wants_two_directions():
    forward, backward = RNN(GRUCell(3, 4)), RNN(GRUCell(3, 4), reverse=True)
    for pair, argument in (((backward, backward), "forward"), ((forward, forward), "backward")):
        with pytest.raises(ArgumentError) as caught:
            Bidirectional(*pair)
        assert lines(caught)[0] == f"Bidirectional: {argument} is not an RNN that runs {argument}."
        assert lines(caught)[1] == f"  got:      {argument}=RNN object, reverse={argument == 'forward'}"
    with pytest.raises(ArgumentError, match="forward is not an RNN"):
        Bidirectional(GRUCell(3, 4), backward)
    with pytest.raises(ArgumentError, match="Bidirectional: merge can't be called with two arrays"):
        Bidirectional(forward, backward, merge="concat")
    with pytest.raises(StructureError) as caught:
        Bidirectional(forward, backward)(jnp.ones((2, 5, 3)), jnp.ones((2, 4)))
    assert lines(caught)[0] == "Bidirectional: the carry is not a pair."
    assert lines(caught)[3] == "  expected: (carry of forward, carry of backward)"
