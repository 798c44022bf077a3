# SPDX-License-Identifier: Apache-2.0
"""Normalizations against their formulas in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

RNG = np.random.default_rng(11)
KINDS = [("0D", (8, 3), (0,)), ("1D", (8, 3, 5), (0, 2)), ("2D", (8, 3, 2, 4), (0, 2, 3))]


def drawn(shape):
    return jnp.asarray(2 + 3 * RNG.normal(size=shape), jnp.float32)


def close(got, expected, tolerance=3e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "shape", "axes"), KINDS)
def test_batch_norm_and_its_running_statistics(kind, shape, axes):
    norm = getattr(objax.nn, f"BatchNorm{kind}")(3, momentum=0.75, eps=0.01)
    dims = norm.beta.shape
    assert dims == (1, 3) + (1,) * (len(shape) - 2)
    gamma, beta = RNG.normal(size=(2, *dims))
    norm.gamma.assign(jnp.asarray(gamma, jnp.float32))
    norm.beta.assign(jnp.asarray(beta, jnp.float32))
    mean, var = np.zeros(dims), np.ones(dims)
    for _ in range(3):
        x = drawn(shape)
        exact = np.asarray(x, np.float64)
        m, v = exact.mean(axes, keepdims=True), exact.var(axes, keepdims=True)
        close(norm(x, training=True), gamma * (exact - m) / np.sqrt(v + 0.01) + beta)
        mean, var = 0.75 * mean + 0.25 * m, 0.75 * var + 0.25 * v
    close(norm.running_mean.value, mean)
    close(norm.running_var.value, var)
    before = np.asarray(norm.running_var.value)
    close(norm(x, training=False), gamma * (exact - mean) / np.sqrt(var + 0.01) + beta)
    np.testing.assert_array_equal(norm.running_var.value, before)


def test_variables_and_their_order():
    norm = objax.nn.BatchNorm2D(2)
    names = [name.partition(").")[2] for name, _ in norm.vars().items()]
    assert names == ["running_mean", "running_var", "beta", "gamma"]
    assert [type(v).__name__ for v in norm.vars()] == ["StateVar", "StateVar", "TrainVar", "TrainVar"]
    names = [name.partition(").")[2] for name, _ in objax.nn.GroupNorm1D(2).vars().items()]
    assert names == ["gamma", "beta"]


def test_channels_last_by_dims_and_redux():
    norm = objax.nn.BatchNorm((1, 1, 1, 3), redux=(0, 1, 2), momentum=0)
    x = drawn((4, 2, 5, 3))
    norm(x, training=True)
    close(norm.running_mean.value.ravel(), np.asarray(x, np.float64).mean((0, 1, 2)))
    assert repr(norm) == "objax.nn.BatchNorm(dims=(1, 1, 1, 3), redux=(0, 1, 2), momentum=0, eps=1e-06)"


def test_statistics_go_on_in_a_compiled_step_and_gradients_pass_the_batch():
    norm = objax.nn.BatchNorm0D(3, momentum=0.5)
    x = drawn((8, 3))
    norm.gamma.assign(jnp.asarray([[1.0, 2.0, 3.0]]))

    @objax.Jit
    def step(x):
        return objax.GradValues(lambda x: (norm(x, training=True) ** 2).sum(), norm.vars(), (0,))(x)

    gradients, _ = step(x)
    # The sum of y^2 hardly depends on x, for y is normalized: its gradient vanishes but for eps.
    assert np.abs(gradients[0]).max() < 1e-3
    close(gradients[2], 2 * 8 * np.array([[1.0, 2.0, 3.0]]), 1e-3)
    close(norm.running_mean.value, 0.5 * np.asarray(x, np.float64).mean(0, keepdims=True))


@pytest.mark.parametrize(("kind", "shape", "axes"), KINDS)
def test_synced_batch_norm_has_the_statistics_of_all_devices(kind, shape, axes):
    norm = getattr(objax.nn, f"SyncedBatchNorm{kind}")(3, momentum=0.5)
    train = objax.Parallel(lambda x: norm(x, training=True), vc=norm.vars())
    still = objax.Parallel(lambda x: norm(x, training=True, batch_norm_update=False), vc=norm.vars())
    x = drawn(shape)
    exact = np.asarray(x, np.float64)
    m, v = exact.mean(axes, keepdims=True), exact.var(axes, keepdims=True)
    with norm.vars().replicate():
        y, again = train(x), still(x)
    close(y, (exact - m) / np.sqrt(v + 1e-6), 1e-4)
    np.testing.assert_array_equal(y, again)
    close(norm.running_mean.value, 0.5 * m)
    close(norm.running_var.value, 0.5 + 0.5 * v)
    close(norm(x, training=False), (exact - 0.5 * m) / np.sqrt(0.5 + 0.5 * v + 1e-6), 1e-4)


def test_synced_batch_norm_that_trains_needs_devices():
    with pytest.raises(NameError, match="device"):
        objax.nn.SyncedBatchNorm0D(3)(jnp.ones((2, 3)), training=True)


@pytest.mark.parametrize(("kind", "rest"), [("0D", ()), ("1D", (5,)), ("2D", (2, 4))])
@pytest.mark.parametrize("groups", [1, 3, 32])
def test_group_norm_normalizes_each_group_of_each_example(kind, rest, groups):
    norm = getattr(objax.nn, f"GroupNorm{kind}")(6, groups=groups, eps=0.01)
    gamma, beta = RNG.normal(size=(2, *norm.gamma.shape))
    norm.gamma.assign(jnp.asarray(gamma, jnp.float32))
    norm.beta.assign(jnp.asarray(beta, jnp.float32))
    x = drawn((4, 6, *rest))
    rows = np.asarray(x, np.float64).reshape(4, min(groups, 6), -1)
    normalized = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + 0.01)
    expected = normalized.reshape(x.shape) * gamma + beta
    close(norm(x), expected)
    np.testing.assert_array_equal(norm(x, training=False), norm(x))


def test_reprs():
    assert repr(objax.nn.SyncedBatchNorm1D(3)) == "objax.nn.SyncedBatchNorm1D(nin=3, momentum=0.999, eps=1e-06)"
    assert repr(objax.nn.GroupNorm(4, 3, 2)) == "objax.nn.GroupNorm(nin=4, rank=3, groups=2, eps=1e-05)"
    assert repr(objax.nn.GroupNorm2D(4)) == "objax.nn.GroupNorm2D(nin=4, groups=4, eps=1e-05)"


@pytest.mark.parametrize(
    ("call", "first", "expected"),
    [
        (
            lambda: objax.nn.BatchNorm0D(3)(jnp.ones((4, 1)), training=True),
            "BatchNorm0D: the input doesn't have the shape that the variables have.",
            "[..., 3]",
        ),
        (
            lambda: objax.nn.BatchNorm0D(1)(jnp.ones((4, 5)), training=False),
            "BatchNorm0D: the input doesn't have the shape that the variables have.",
            "[..., 1]",
        ),
        (
            lambda: objax.nn.BatchNorm2D(3)(jnp.ones((4, 8, 8, 3)), training=True),
            "BatchNorm2D: the input doesn't have the shape that the variables have.",
            "[..., 3, ..., ...]",
        ),
        (
            lambda: objax.nn.BatchNorm2D(3)(jnp.ones((4, 3)), training=True),
            "BatchNorm2D: the input doesn't have the shape that the variables have.",
            "[..., 3, ..., ...]",
        ),
        (
            lambda: objax.nn.SyncedBatchNorm1D(3)(jnp.ones((4, 3)), training=False),
            "SyncedBatchNorm1D: the input doesn't have the shape that the variables have.",
            "[..., 3, ...]",
        ),
        (
            lambda: objax.nn.GroupNorm0D(4, groups=2)(jnp.ones((2, 8))),
            "GroupNorm0D: the input isn't of rank 2 with 4 channels.",
            "[batch, 4]",
        ),
        (
            lambda: objax.nn.GroupNorm2D(4)(jnp.ones((2, 4, 3))),
            "GroupNorm2D: the input isn't of rank 4 with 4 channels.",
            "[batch, 4, ..., ...]",
        ),
        (
            lambda: objax.nn.GroupNorm(6, rank=2, groups=4),
            "GroupNorm: nin should be divisible by groups.",
            "nin a multiple of groups",
        ),
        (
            lambda: objax.nn.GroupNorm(6, rank=2, groups=0),
            "GroupNorm: nin should be divisible by groups.",
            "nin a multiple of groups",
        ),
    ],
)
def test_misuse(call, first, expected):
    with pytest.raises(MisuseError) as error:
        call()
    assert error.value.what == first
    assert error.value.expected == expected


def test_training_must_be_said():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'training'"):
        objax.nn.BatchNorm0D(3)(jnp.ones((2, 3)))


@pytest.mark.parametrize("make", [lambda: objax.nn.BatchNorm0D(3), lambda: objax.nn.GroupNorm0D(3)])
def test_a_wrong_input_leaves_the_statistics_alone(make):
    norm = make()
    before = jax.tree.map(np.asarray, norm.vars().tensors())
    with pytest.raises(MisuseError):
        norm(jnp.ones((2, 4)), training=True)
    for old, new in zip(before, norm.vars().tensors(), strict=True):
        np.testing.assert_array_equal(old, new)
