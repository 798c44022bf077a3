# SPDX-License-Identifier: Apache-2.0
"""PrivateGradValues against gradients that are clipped by hand in float64, and the size of its noise."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.privacy.dpsgd import PrivateGradValues

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 3)).astype("f"), RNG.normal(size=(12, 2)).astype("f")
W, B = RNG.normal(size=(3, 2)).astype("f"), RNG.normal(size=2).astype("f")
BOTH = pytest.mark.parametrize("use_norm_accumulation", [False, True])


def regression():
    """A linear layer, and the loss 1/2 |x w + b - y|^2, averaged over a microbatch."""
    layer = objax.nn.Linear(3, 2)
    layer.w.assign(jnp.asarray(W))
    layer.vars()["(Linear).b"].assign(jnp.asarray(B))

    def loss(x, y):
        error = layer(x) - y
        value = 0.5 * (error**2).sum(1).mean()
        return value, {"error": error.mean(), "size": jnp.asarray(len(x))}

    return layer, loss


def clipped_by_hand(clip, microbatch):
    """In float64: the gradients of each microbatch, clipped, and their mean; of b and w, as the layer has them."""
    x, y, w, b = (a.astype(np.float64) for a in (X, Y, W, B))
    total, norms = [np.zeros(2), np.zeros((3, 2))], []
    for start in range(0, len(x), microbatch):
        part, error = x[start : start + microbatch], None
        error = part @ w + b - y[start : start + microbatch]
        gradients = [error.mean(0), part.T @ error / microbatch]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        norms.append(norm)
        total = [t + g * min(1, clip / norm) for t, g in zip(total, gradients, strict=True)]
    count = len(x) // microbatch
    return [t / count for t in total], norms


@BOTH
@pytest.mark.parametrize(("microbatch", "jit"), [(1, True), (3, False), (12, True)])
def test_the_gradient_of_each_microbatch_is_clipped(microbatch, jit, use_norm_accumulation):
    layer, loss = regression()
    for clip in (0.5, 2.5, 1e6):
        expected, norms = clipped_by_hand(clip, microbatch)
        gv = PrivateGradValues(
            loss, layer.vars(), 0.0, clip, microbatch, (0, 0), objax.random.Generator(1), use_norm_accumulation
        )
        gradients, values = (objax.Jit(gv) if jit else gv)(X, Y)
        for gradient, by_hand in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(gradient, by_hand, rtol=2e-6, atol=1e-6)
        error = X.astype(np.float64) @ W + B - Y
        np.testing.assert_allclose(values[0], 0.5 * (error**2).sum(1).mean(), rtol=1e-6)
        np.testing.assert_allclose(values[1]["error"], error.mean(), rtol=1e-5)
        assert values[1]["size"] == microbatch
    if microbatch == 1:
        assert min(norms) < 2.5 < max(norms)  # of the three, one clip bites everywhere, one here and there, one never


@BOTH
def test_the_variables_are_found(use_norm_accumulation):
    layer, loss = regression()
    expected, _ = clipped_by_hand(1.0, 3)
    unused = objax.TrainVar(jnp.ones(5))
    gv = PrivateGradValues(loss, None, 0.0, 1.0, 3, (0, 0), use_norm_accumulation=use_norm_accumulation)
    gradients = objax.Jit(gv)(X, Y)[0]
    for gradient, by_hand in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, by_hand, rtol=2e-6, atol=1e-6)
    assert unused.shape == (5,)


def test_variables_by_name():
    layer, loss = regression()
    gv = PrivateGradValues(loss, layer.vars(), 1.0, 1.0, 1, (0, 0), objax.random.Generator(0))
    assert list(gv.vars().keys()) == [
        "(PrivateGradValues)(Linear).b",
        "(PrivateGradValues)(Linear).w",
        "(PrivateGradValues).keygen(Generator)._key",
    ]
    assert gv.vars("scope.")["scope.(PrivateGradValues)(Linear).b"] is layer.b


@BOTH
def test_a_loss_that_is_no_tuple(use_norm_accumulation):
    w = objax.TrainVar(jnp.zeros((1, 1)))
    gv = PrivateGradValues(
        lambda x: 0.5 * ((x - w.value) ** 2).mean(), None, 0.0, 3.0, 2, use_norm_accumulation=use_norm_accumulation
    )
    x = np.array([[2], [3], [5], [-14], [8], [-4]], np.float32)
    gradients, values = gv(x)
    np.testing.assert_allclose(gradients[0], [[-(2.5 - 3 + 2) / 3]], rtol=1e-6)  # of -2.5, 4.5 and -2
    np.testing.assert_allclose(values[0], 0.5 * (x**2).mean(), rtol=1e-6)
    assert isinstance(values, list)


@BOTH
def test_arguments_may_be_trees(use_norm_accumulation):
    layer, loss = regression()
    f = lambda batch: loss(batch["x"], batch["y"])
    expected, _ = clipped_by_hand(1.0, 3)
    gv = PrivateGradValues(f, layer.vars(), 0.0, 1.0, 3, use_norm_accumulation=use_norm_accumulation)
    for gradient, by_hand in zip(gv({"x": X, "y": Y})[0], expected, strict=True):
        np.testing.assert_allclose(gradient, by_hand, rtol=2e-6, atol=1e-6)


class TestNoise:
    @BOTH
    @pytest.mark.parametrize(("multiplier", "clip", "microbatch"), [(1.5, 0.2, 1), (0.7, 3.0, 4)])
    def test_its_size(self, multiplier, clip, microbatch, use_norm_accumulation):
        """4,000 draws of two variables, of a loss without a slope: what comes back is the noise."""
        v, w = objax.TrainVar(jnp.zeros(3)), objax.TrainVar(jnp.zeros(()))
        loss = lambda x: 0 * (v.value.sum() + w.value) * x.sum()
        keygen = objax.random.Generator(3)
        gv = PrivateGradValues(
            loss, objax.VarCollection(v=v, w=w), multiplier, clip, microbatch, (0,), keygen, use_norm_accumulation
        )
        draw = objax.Jit(gv)
        x = jnp.ones(8)
        draws = np.array([np.append(*map(np.ravel, draw(x)[0])) for _ in range(4000)], np.float64)
        scale = clip * multiplier / (8 // microbatch)
        np.testing.assert_allclose(np.sqrt((draws**2).mean()), scale, rtol=0.02)
        np.testing.assert_allclose(draws.std(0), scale, rtol=0.05)
        np.testing.assert_allclose(draws.mean(0) / scale, 0, atol=0.06)
        between = np.corrcoef(draws.T) - np.eye(4)  # of variables
        following = [np.corrcoef(d[1:], d[:-1])[0, 1] for d in draws.T]  # of calls
        assert np.abs(between).max() < 0.06 > np.abs(following).max()
        tails = np.mean(np.abs(draws) > 2 * scale)
        np.testing.assert_allclose(tails, 0.0455, rtol=0.1)  # as a Gaussian's

    def test_it_comes_from_keygen(self):
        w = objax.TrainVar(jnp.zeros(3))
        keygen = objax.random.Generator(7)
        gv = PrivateGradValues(lambda x: (w.value * x[0]).sum() * 0, None, 2.0, 0.5, 1, keygen=keygen)
        before = np.array(objax.random.DEFAULT_GENERATOR.key.value)
        (noise,), _ = gv(jnp.ones((4, 3)))
        key = objax.random.Generator(7)()
        np.testing.assert_array_equal(noise, jax.random.normal(key, (3,)) * (2.0 * 0.5 / 4))
        np.testing.assert_array_equal(objax.random.DEFAULT_GENERATOR.key.value, before)
        assert not np.array_equal(gv(jnp.ones((4, 3)))[0][0], noise)

    def test_it_has_the_dtype_of_the_variable(self):
        w = objax.TrainVar(jnp.ones(3, jnp.bfloat16))
        gv = PrivateGradValues(lambda x: (w.value * x[0]).sum(), None, 1.0, 0.5, 1)
        assert gv(jnp.ones((4, 3), jnp.bfloat16))[0][0].dtype == jnp.bfloat16


class TestTwoPasses:
    """Norm accumulation, against the plain way."""

    def test_the_second_has_the_dropout_of_the_first(self):
        net = objax.nn.Sequential(
            [objax.nn.Linear(3, 16), objax.functional.tanh, objax.nn.Dropout(0.5), objax.nn.Linear(16, 2)]
        )
        keygen = objax.random.Generator(5)
        net[2].keygen = keygen
        loss = lambda x, y: ((net(x, training=True) - y) ** 2).mean()
        found = []
        for use_norm_accumulation in (False, True):
            keygen.seed(5)
            gv = PrivateGradValues(loss, net.vars(), 0.0, 0.1, 1, (0, 0), use_norm_accumulation=use_norm_accumulation)
            found.append([gv(X, Y), gv(X, Y), keygen.key.value])
        for plain, accumulated in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(accumulated, plain, rtol=1e-5, atol=1e-7)
        first, second, _ = found[0]
        assert not np.allclose(first[0][1], second[0][1])  # the next call has another one

    @BOTH
    def test_statistics_are_written_once(self, use_norm_accumulation):
        norm, layer = objax.nn.BatchNorm0D(3, momentum=0.9), objax.nn.Linear(3, 2)
        net = objax.nn.Sequential([norm, layer])
        loss = lambda x, y: ((net(x, training=True) - y) ** 2).mean()
        gv = PrivateGradValues(loss, net.vars(), 1.0, 0.1, 4, (0, 0), use_norm_accumulation=use_norm_accumulation)
        objax.Jit(gv)(X, Y)
        np.testing.assert_allclose(norm.running_mean.value[0], 0.1 * X.astype(np.float64).mean(0), rtol=1e-4)


def test_nothing_is_left_at_a_clip_of_zero():
    w = objax.TrainVar(jnp.ones(2))
    gv = PrivateGradValues(lambda x: (w.value * x[0]).sum(), None, 1.0, 0, 1)
    x = jnp.array([[0.0, 0.0], [3.0, 4.0]])  # the first gradient is zero
    assert gv(x)[0][0].tolist() == [0.0, 0.0]


def test_training_goes_on_without_it():
    """In the place of GradValues, with an optimizer, under Jit: a little noise hardly matters."""
    layer = objax.nn.Linear(3, 1)
    x = np.random.default_rng(1).normal(size=(64, 3)).astype("f")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "f") + 0.25
    gv = PrivateGradValues(lambda x, y: ((layer(x) - y) ** 2).mean(), layer.vars(), 0.02, 1.0, 1, (0, 0))
    sgd = objax.optimizer.SGD(layer.vars())

    @objax.Jit
    def train(x, y):
        gradients, values = gv(x, y)
        sgd(0.1, gradients)
        return values[0]

    losses = [float(train(x, y)) for _ in range(150)]
    assert losses[0] > 1 and losses[-1] < 1e-4
    np.testing.assert_allclose(layer.w.value[:, 0], [1.0, -2.0, 0.5], atol=0.02)
    np.testing.assert_allclose(layer.vars()["(Linear).b"].value, [0.25], atol=0.02)


def test_without_variables_there_are_the_values():
    gv = PrivateGradValues(lambda x: x.sum(), objax.VarCollection(), 1.0, 0.5, 2)
    gradients, values = gv(jnp.arange(4.0))
    assert gradients == [] and values[0] == 3.0


def test_repr_and_signature():
    def my_loss(x, y, scale=1.0):
        return (x - y).sum() * scale

    gv = PrivateGradValues(my_loss, objax.VarCollection(), 1.0, 0.5, 2, (0, 0))
    assert repr(gv) == (
        "objax.privacy.dpsgd.gradient.PrivateGradValues(f=my_loss(*, scale=1.0), noise_multiplier=1.0, "
        "l2_norm_clip=0.5, microbatch=2, batch_axis=(0, 0))"
    )
    assert list(inspect.signature(gv).parameters) == ["x", "y", "scale"]


def test_microbatches():
    gv = PrivateGradValues(lambda x: x.sum(), objax.VarCollection(), 1.0, 0.5, 2)
    parts = gv.reshape_microbatch(jnp.arange(12.0).reshape(4, 3))
    assert parts.shape == (2, 2, 3) and parts[1, 0].tolist() == [6.0, 7.0, 8.0]


class TestErrors:
    def test_axes(self):
        with pytest.raises(ValueError) as caught:
            PrivateGradValues(lambda x, y: x, None, 1.0, 1.0, 1, batch_axis=(0, 1))
        assert str(caught.value) == (
            "batch_axis needs to be an all zero tuple for PrivateGradValues.\n"
            "  got:      batch_axis=(0, 1)\n"
            "  expected: a 0 for each argument: privacy is counted by the examples of axis 0\n"
            "  fix:      batch_axis=(0, 0)"
        )

    @pytest.mark.parametrize(
        ("name", "value", "least"),
        [("noise_multiplier", -0.5, 0), ("l2_norm_clip", float("nan"), 0), ("microbatch", 0, 1)],
    )
    def test_numbers(self, name, value, least):
        settings = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0, "microbatch": 1} | {name: value}
        with pytest.raises(AssertionError) as caught:
            PrivateGradValues(lambda x: x, None, **settings)
        assert str(caught.value) == (
            f"PrivateGradValues: {name} is out of its range.\n"
            f"  got:      {name}={value}\n"
            f"  expected: a finite number of at least {least}"
        )

    @pytest.mark.parametrize(("x", "got"), [(X[:5], "float32[5, 3]"), (X[:0], "float32[0, 3]"), (2.0, "2.0")])
    def test_batches(self, x, got):
        gv = PrivateGradValues(lambda x: x.sum(), objax.VarCollection(), 1.0, 1.0, 3)
        with pytest.raises(AssertionError) as caught:
            gv(x)
        assert str(caught.value) == (
            "PrivateGradValues: the batch isn't made of whole microbatches.\n"
            f"  got:      {got}\n"
            "  expected: a first axis of 3, 6, 9 ... examples\n"
            "  fix:      one of\n"
            "    1. leave the rest of the examples out\n"
            "    2. microbatch=1"
        )

    def test_arguments_without_an_axis(self):
        _, loss = regression()
        with pytest.raises(AssertionError, match="passed 2 must match batched 1"):
            PrivateGradValues(loss, None, 1.0, 1.0, 3)(X, Y)
