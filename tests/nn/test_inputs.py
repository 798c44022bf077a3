# SPDX-License-Identifier: Apache-2.0
"""What layers ask of arguments and inputs, where the layers' own tests don't say it already."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._inputs import at_least_float32, integer


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), np.asarray(3)], ids=lambda value: type(value).__name__)
def test_any_integer_is_read_as_an_int(value):
    assert integer("Layer", "size", value) == 3
    assert type(integer("Layer", "size", value)) is int


def test_a_traced_size_is_an_error():
    with pytest.raises(ArgumentError, match="Linear: in_features is not an integer"):
        jax.eval_shape(lambda n: nn.Linear(n, 2)(jnp.ones(3)), jnp.asarray(3))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float32),
        (jnp.float32, jnp.float32),
        (np.float64, np.float64),
        (jnp.complex64, jnp.complex64),
    ],
    ids=lambda dtype: dtype.__name__,
)
def test_dtype_of_sums(dtype, wanted):
    assert at_least_float32(jnp.dtype(dtype)) == wanted


def test_message_of_a_wrong_size():
    with pytest.raises(ArgumentError) as caught:
        nn.Linear(0, 2)
    assert str(caught.value) == (
        "Linear: in_features is not an integer of at least 1.\n"
        "  got:      in_features=0\n"
        "  expected: an int >= 1\n"
        "  fix:      pass in_features=1 or more"
    )


def test_message_of_a_wrong_dtype():
    with pytest.raises(ArgumentError) as caught:
        nn.Linear(1, 2, dtype=jnp.int32)
    assert str(caught.value) == (
        "Linear: dtype is not a floating dtype.\n"
        "  got:      dtype=int32\n"
        "  expected: float16, bfloat16, float32, float64 or a complex dtype\n"
        "  fix:      dtype=jnp.float32"
    )


def test_message_of_an_input_that_is_no_array():
    with pytest.raises(DtypeError) as caught:
        nn.Linear(2, 2)([1.0, 2.0])
    assert str(caught.value) == (
        "Linear: the input is not an array of numbers.\n"
        "  at:       the module itself  (Linear)\n"
        "  got:      list of 2\n"
        "  expected: a JAX or NumPy array\n"
        "  fix:      jnp.asarray(x) for a list or a Python number"
    )


@pytest.mark.parametrize("wrong", [3, "normal", jnp.ones((2, 3))], ids=str)
def test_initializer_is_a_function(wrong):
    with pytest.raises(ArgumentError, match="Linear: weight_init is not an initializer"):
        nn.Linear(3, 2, weight_init=wrong)


def test_initializer_keeps_to_the_shape():
    with pytest.raises(ShapeError) as caught:
        nn.Linear(3, 2, bias_init=lambda key, shape, dtype: jnp.zeros(3, dtype))
    assert (caught.value.got, caught.value.expected) == ("float32[3]", "float32[2]")
    assert caught.value.what == "Linear: bias_init gave another shape than it was asked for."


def test_initializer_may_give_another_dtype():
    assert nn.Linear(3, 2, weight_init=lambda key, shape, dtype: np.ones(shape)).weight.dtype == jnp.float32


@pytest.mark.parametrize(
    "layer", [nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1)], ids=lambda m: type(m).__name__
)
def test_compute_dtype_is_floating(layer: tether.Module):
    with pytest.raises(ArgumentError, match="compute_dtype is not a floating dtype"):
        tether.view(layer, compute_dtype=jnp.int32)(jnp.ones((2, 2)))


def test_a_real_compute_dtype_would_drop_the_imaginary_part():
    linear = tether.view(nn.Linear(2, 2), compute_dtype=jnp.float32)
    with pytest.raises(DtypeError, match="Linear: a real compute_dtype would drop the imaginary part"):
        linear(jnp.ones(2, jnp.complex64))
