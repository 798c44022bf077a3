# SPDX-License-Identifier: Apache-2.0
"""Losses against float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

RNG = np.random.default_rng(3)
loss = objax.functional.loss


def drawn(*shape, scale=1.0):
    exact = RNG.normal(size=shape).astype(np.float32) * np.float32(scale)
    return jnp.asarray(exact), exact.astype(np.float64)


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-5, atol=1e-6)


def log_softmax(x):
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4)])
@pytest.mark.parametrize("scale", [1, 100])
def test_cross_entropies_of_softmax(shape, scale):
    logits, exact = drawn(*shape, scale=scale)
    labels = RNG.integers(0, 4, shape[:-1])
    dense = np.eye(4)[labels]
    expected = -(log_softmax(exact) * dense).sum(-1)
    np.testing.assert_allclose(
        loss.cross_entropy_logits(logits, jnp.asarray(dense, jnp.float32)), expected, atol=1e-4, rtol=1e-5
    )
    np.testing.assert_allclose(
        loss.cross_entropy_logits_sparse(logits, jnp.asarray(labels)), expected, atol=1e-4, rtol=1e-5
    )


def test_soft_labels():
    logits, exact = drawn(5, 3)
    labels = RNG.dirichlet([1, 1, 1], 5)
    close(loss.cross_entropy_logits(logits, jnp.asarray(labels, jnp.float32)), -(log_softmax(exact) * labels).sum(-1))


@pytest.mark.parametrize("label", [0, 2, -1, np.int64(1)])
def test_one_class_for_all(label):
    logits, exact = drawn(5, 3)
    close(loss.cross_entropy_logits_sparse(logits, label), -log_softmax(exact)[:, label])


def test_sigmoid_cross_entropy_stays_exact_where_the_logits_are_large():
    logits = np.array([-90.0, -20.0, -1.0, 0.0, 2.0, 20.0, 90.0])
    for label in (0.0, 0.3, 1.0):
        expected = label * np.logaddexp(0, -logits) + (1 - label) * np.logaddexp(0, logits)
        got = loss.sigmoid_cross_entropy_logits(jnp.asarray(logits, jnp.float32), jnp.full(7, label))
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1e-6, atol=1e-30 if label == 0 else 4e-6)


@pytest.mark.parametrize("keep_axis", [None, (), (0,), (1,), [0, 2], (0, 1, 2)])
def test_means_over_the_other_axes(keep_axis):
    (x, a), (y, b) = drawn(2, 3, 4), drawn(2, 3, 4)
    axes = tuple(axis for axis in range(3) if axis not in (keep_axis or ()))
    close(loss.mean_absolute_error(x, y, keep_axis), np.abs(a - b).mean(axes))
    close(loss.mean_squared_error(x, y, keep_axis), ((a - b) ** 2).mean(axes))
    logs = (np.log1p(np.abs(a)) - np.log1p(np.abs(b))) ** 2
    close(loss.mean_squared_log_error(abs(x), abs(y), keep_axis), logs.mean(axes))


def test_examples_are_kept_unless_it_is_said():
    (x, a), (y, b) = drawn(2, 3), drawn(2, 3)
    close(loss.mean_squared_error(x, y), ((a - b) ** 2).mean(1))
    close(loss.mean_absolute_error(jnp.array(2.0), jnp.array(-1.0)), 3.0)


def test_l2_is_half_the_sum_of_squares():
    x, a = drawn(3, 4)
    close(loss.l2(x), 0.5 * (a**2).sum())
    close(loss.l2(objax.TrainVar(x)), 0.5 * (a**2).sum())


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy_logits",
        "mean_absolute_error",
        "mean_squared_error",
        "mean_squared_log_error",
        "sigmoid_cross_entropy_logits",
    ],
)
def test_shapes_that_differ_broadcast_with_a_warning(name):
    function = getattr(loss, name)
    x, y = jnp.abs(drawn(4, 3)[0]), jnp.abs(drawn(1, 3)[0])
    text = rf"^ {loss.WARN_SHAPE_MISMATCH} {name} : arg1 \(4, 3\) and arg2 \(1, 3\)$"
    with pytest.warns(UserWarning, match=text) as seen:
        got = function(x, y)
    assert seen[0].filename == __file__
    np.testing.assert_array_equal(got, function(x, jnp.broadcast_to(y, (4, 3))))


@pytest.mark.parametrize(
    ("labels", "what", "expected"),
    [
        (jnp.zeros((5, 3), int), "the labels aren't one class for each row of logits.", "labels int[5]"),
        (jnp.zeros(1, int), "the labels aren't one class for each row of logits.", "labels int[5]"),
        (jnp.zeros(5), "the labels aren't one class for each row of logits.", "labels int[5]"),
        (3, "there is no such class.", "0 to 2"),
        (-4, "there is no such class.", "0 to 2"),
    ],
)
def test_labels_that_fit_no_logits(labels, what, expected):
    with pytest.raises(MisuseError) as error:
        loss.cross_entropy_logits_sparse(jnp.zeros((5, 3)), labels)
    assert error.value.what == f"cross_entropy_logits_sparse: {what}"
    assert error.value.expected == expected


def test_axes_counted_from_the_end():
    with pytest.raises(MisuseError) as error:
        loss.mean_squared_error(jnp.zeros((2, 3)), jnp.zeros((2, 3)), keep_axis=(-1,))
    assert str(error.value) == (
        "mean_squared_error: keep_axis counts axes from the front.\n"
        "  got:      keep_axis=(-1,), for float32[2, 3]\n"
        "  expected: numbers of axes, from 0\n"
        "  fix:      keep_axis=(1,)"
    )


@pytest.mark.mixed_dtypes
def test_whole_numbers_as_targets():
    x, a = drawn(4)
    y = jnp.array([0, 1, 4, 2], jnp.uint32)
    close(loss.mean_squared_error(x, y, None), ((a - np.array([0, 1, 4, 2])) ** 2).mean())


def test_gradient_of_cross_entropy_is_softmax_minus_labels():
    logits, exact = drawn(4, 3)
    labels = np.eye(3)[[0, 2, 1, 1]]
    dense = jnp.asarray(labels, jnp.float32)
    (got,) = objax.Grad(lambda x: loss.cross_entropy_logits(x, dense).sum(), None, (0,))(logits)
    close(got, np.exp(log_softmax(exact)) - labels)
    (got,) = objax.Grad(lambda x: loss.sigmoid_cross_entropy_logits(x, dense).sum(), None, (0,))(logits)
    close(got, 1 / (1 + np.exp(-exact)) - labels)
