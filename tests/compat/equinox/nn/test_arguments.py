# SPDX-License-Identifier: Apache-2.0
"""Paddings, ranks and the old name of inference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx
from tether.compat.equinox.nn._arguments import pairs

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        (2, ((2, 2), (2, 2))),
        ((1, 2), ((1, 1), (2, 2))),
        ([1, 2], ((1, 1), (2, 2))),
        (((0, 1), (2, 3)), ((0, 1), (2, 3))),
        ([[0, 1], [2, 3]], ((0, 1), (2, 3))),
        ((1, (2, 3)), ((1, 1), (2, 3))),
        (np.int64(1), ((1, 1), (1, 1))),
        (-1, ((-1, -1), (-1, -1))),  # takes elements off
    ],
)
def test_paddings(padding, expected):
    assert pairs("Conv2d", padding, 2) == expected


@pytest.mark.parametrize("padding", [(1,), (1, 1, 1), ((1, 1),), ((1, 1, 1), 1), 1.5, None])
def test_other_paddings_are_none(padding):
    with pytest.raises(ValueError, match="Conv2d: padding is neither") as error:
        pairs("Conv2d", padding, 2)
    assert error.value.fixes == []


def test_a_word_is_no_padding():
    with pytest.raises(ValueError) as error:
        eqx.nn.Conv2d(1, 1, 3, padding="SAME", key=KEY)
    assert str(error.value) == (
        "Conv2d: padding is neither a number, nor a number or a pair for each of 2 space axes.\n"
        "  got:      padding='SAME'\n"
        "  expected: padding=1, padding=(1, 1) or padding=((0, 1), (0, 1))\n"
        "  fix:      padding=kernel_size // 2, for what is 'SAME' elsewhere"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda number: eqx.nn.Conv2d(1, 1, number, key=KEY),
        lambda number: eqx.nn.Conv2d(1, 1, 1, stride=number, key=KEY),
        lambda number: eqx.nn.Conv2d(1, 1, 1, dilation=number, key=KEY),
        lambda number: eqx.nn.ConvTranspose2d(1, 1, number, key=KEY),
        lambda number: eqx.nn.ConvTranspose2d(1, 1, 1, stride=number, key=KEY),
        lambda number: eqx.nn.ConvTranspose2d(1, 1, 1, stride=3, output_padding=number, key=KEY),
        lambda number: eqx.nn.ConvTranspose2d(1, 1, 1, dilation=number, key=KEY),
        lambda number: eqx.nn.MaxPool2d(number, 1),
        lambda number: eqx.nn.AvgPool2d(1, number),
        lambda number: eqx.nn.AdaptiveMaxPool2d(number),
    ],
)
def test_one_number_for_each_axis(make):
    for number in (2, (2, 2), [2, 2]):
        hash(jax.tree.structure(make(number)))
    for number in ((2,), (2, 2, 2), 2.5, None):
        with pytest.raises(ValueError, match="numbers for 2 space axes|is not an integer"):
            make(number)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: eqx.nn.Conv2d(3, 1, 1, key=KEY), "Conv2d"),
        (lambda: eqx.nn.ConvTranspose2d(3, 1, 1, key=KEY), "ConvTranspose2d"),
        (lambda: eqx.nn.MaxPool2d(1, 1), "MaxPool2d"),
        (lambda: eqx.nn.AdaptiveAvgPool2d(1), "AdaptiveAvgPool2d"),
    ],
)
def test_a_layer_takes_one_example(layer, name):
    raised = AssertionError if name == "MaxPool2d" else ValueError
    with pytest.raises(raised) as error:
        layer()(jnp.ones((2, 3, 4, 4)))
    assert str(error.value) == (
        f"{name}: x isn't one example, which has 3 axes.\n"
        "  got:      float32[2, 3, 4, 4]\n"
        "  expected: [channels, _, _]\n"
        "  fix:      jax.vmap(layer)(x), for a batch"
    )
    with pytest.raises(raised) as error:
        layer()(jnp.ones((4, 4)))
    assert error.value.fixes == ["x[None], for a single channel"]


def test_the_old_name_of_inference():
    with pytest.warns(UserWarning, match="^Dropout: deterministic= is the old name of inference=.$") as record:
        layer = eqx.nn.Dropout(0.5, deterministic=True)
    assert layer.inference is True and layer.deterministic is True
    assert record[0].filename == __file__
    x = jnp.ones(8)
    with pytest.warns(UserWarning, match="^Dropout: deterministic=") as record:
        y = layer(x, key=KEY, deterministic=False)
    assert record[0].filename == __file__ and set(y.tolist()) == {0.0, 2.0}
    attention = eqx.nn.MultiheadAttention(1, 2, dropout_p=0.5, key=KEY)
    sequence = jnp.ones((3, 2))
    with pytest.warns(UserWarning, match="^MultiheadAttention: deterministic=") as record:
        y = attention(sequence, sequence, sequence, deterministic=True)
    assert record[0].filename == __file__
    np.testing.assert_array_equal(y, attention(sequence, sequence, sequence, inference=True))
